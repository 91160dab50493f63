"""The compiled extension, built in a folder of its own, and used from there.

    python profiling/with_extension.py --build DIR [--cpp] --outcomes FILE
    python profiling/with_extension.py --use DIR/lib SCRIPT [ARGUMENT ...]

The first builds the compiled kernels as setup.py does, checks it against the references
(``tests/csrc/check_extension.py``) and, on a GPU, runs the tests of the backend that rests on it.
Outcomes go to FILE, as the plugin `outcomes` writes them. What has been built of the same sources
for the same torch is not built again. The second runs a script in which the extension is found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SCRIPT = "tests/csrc/check_extension.py"
_TESTS = "tests/gpu/test_transducer_cuda.py"


def _key(switch: str) -> str:
    """What a build depends on."""
    digest = hashlib.sha256(f"{version('torch')} {platform.python_version()} {switch}".encode())
    for path in [ROOT / "setup.py", *sorted((ROOT / "csrc").iterdir())]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def build(folder: Path, switch: str) -> Path:
    """Build, unless the same has been built there; returns where the package lies.

    Raises:
        subprocess.CalledProcessError: It cannot be built; the reason is on the screen.
    """
    key, library = _key(switch), folder / "lib"
    kept = folder / "key"
    if kept.exists() and kept.read_text(encoding="ascii") == key and any(library.rglob("_cpu.so")):
        sys.stdout.write("extension: built before of the same sources\n")
        return library
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Without pyproject.toml any setuptools will do.
    shutil.copy(ROOT / "setup.py", folder)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    jobs = {"MAX_JOBS": str(max(1, (os.cpu_count() or 1) // 4))}
    places = ["--build-lib", "lib", "--build-temp", "temporary"]
    command = [sys.executable, "setup.py", "build_ext", *places]
    subprocess.run(command, cwd=folder, env=os.environ | jobs | {switch: "1"}, check=True)
    shutil.rmtree(folder / "temporary", ignore_errors=True)
    kept.write_text(key, encoding="ascii")
    return library


def check(library: Path, backend: str) -> bool:
    """Whether the extension computes what the references do."""
    command = [sys.executable, "-P", str(ROOT / _SCRIPT), str(library), backend]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test(library: Path, outcomes: Path) -> None:
    """Run the GPU tests of the backend ``cuda``, which append to the outcomes."""
    plugins = ["-p", "suite.outcomes", "-p", "suite.poison", "-p", "no:cacheprovider"]
    options = ["-q", "-m", "gpu", "-W", "ignore::pytest.PytestConfigWarning"]
    records = ["--outcomes", str(outcomes), "--done", os.devnull]
    inner = [*plugins, *options, *records, str(ROOT / _TESTS)]
    code = f"import sys, pytest; sys.exit(pytest.main({inner!r}))"
    use_and_run = f"from with_extension import use; use({str(library)!r}); {code}"
    subprocess.run([sys.executable, "-c", use_and_run], cwd=ROOT, check=False)


def use(library: Path | str) -> None:
    """Make the extension a part of the package, in this process."""
    import effasr_kernels

    effasr_kernels.__path__.append(str(Path(library) / "effasr_kernels"))


def _run(library: Path, script: str, arguments: list[str]) -> None:
    """Run a script as if it had been called itself."""
    use(library)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def main(arguments: list[str]) -> int:
    """Build, or run a script; returns the exit code."""
    if arguments[:1] == ["--use"]:
        _run(Path(arguments[1]), arguments[2], arguments[3:])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--build", type=Path, required=True, metavar="DIR")
    parser.add_argument("--cpp", action="store_true", help="for a CPU alone")
    parser.add_argument("--outcomes", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        library = build(options.build, "EFFASR_BUILD_CPP" if options.cpp else "EFFASR_BUILD_CUDA")
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"extension: the build failed with exit code {error.returncode}\n")
        return 1
    right = check(library, "cpu-extension" if options.cpp else "cuda-extension")
    line = {"test": _SCRIPT, "outcome": "passed" if right else "failed"}
    options.outcomes.write_text(json.dumps(line) + "\n", encoding="utf-8")
    if right and not options.cpp:
        test(library, options.outcomes)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
