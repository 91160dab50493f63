"""Everything that needs a GPU, in one command: the GPU tests first, then the benchmarks.

    python profiling/gpu_suite.py [--output DIR] [--sanitize] [--transducer]

Stops before the benchmarks where a test fails: a speed counts only behind green tests. The tests'
report is DIR/gpu_tests.xml, the rows are DIR/ops.csv.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
KERNELS = TESTS / "gpu"
DATA_PACKAGES = ("lhotse", "sentencepiece", "soundfile", "soxr")
# One dtype on two awkward lists of lengths, of every kernel: the tool slows them a hundredfold.
SANITIZED = "bfloat16 and (odd or empty_among_others)"
_SANITIZER_FAILED, _NO_TESTS = 99, 5
_PROCESSES = 12


def gpu_tests() -> list[str]:
    """What has GPU tests; those of the data, only where its packages are installed."""
    absent = [name for name in DATA_PACKAGES if importlib.util.find_spec(name) is None]
    # Marked when collected, where no word in the files says so.
    found = [str(KERNELS)]
    for path in sorted(TESTS.rglob("test_*.py")):
        if KERNELS in path.parents or "mark.gpu" not in path.read_text(encoding="utf-8"):
            continue
        if absent and TESTS / "data" in path.parents:
            sys.stderr.write(f"gpu_suite: left out {path}: needs {', '.join(absent)}.\n")
            continue
        found.append(str(path))
    return found


def environment() -> dict[str, str]:
    """That of the commands: this checkout first, and kernels on the GPU."""
    variables = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT), str(ROOT / "kernels"), variables.get("PYTHONPATH", "")]
    return variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def pytest(*arguments: str) -> list[str]:
    """A command; options of plugins that a bare machine lacks are no reason to stop."""
    quiet = ["-q", "-W", "ignore::pytest.PytestConfigWarning", "-p", "no:cacheprovider"]
    # torch 2.9 and 2.10 say so, once, where tests turn TF32 off in the way that older ones know.
    quiet += ["-W", "ignore:Please use the new API settings:UserWarning"]
    return [sys.executable, "-m", "pytest", *quiet, "-m", "gpu", *arguments]


def parallel() -> list[str]:
    """Options for several processes: most of the time goes into compiling kernels, on the host."""
    if importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(max(1, min(_PROCESSES, (os.cpu_count() or 1) * 3 // 4)))]


def find_sanitizer() -> str | None:
    """compute-sanitizer, which comes with the CUDA toolkit."""
    places = [os.environ.get("PATH", "")]
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if name in os.environ:
            places.append(str(Path(os.environ[name]) / "bin"))
    places.append("/usr/local/cuda/bin")
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def run(command: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None) -> int:
    """The exit code; 124 where it took too long, and was ended."""
    try:
        return subprocess.run(
            command, cwd=ROOT, check=False, timeout=max(1.0, seconds), env=variables
        ).returncode
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"gpu_suite: ended after {seconds:.0f} s: {' '.join(command[:5])} ...\n")
        return 124


def test(output: Path, seconds: float) -> int:
    """All GPU tests."""
    report = f"--junitxml={output / 'gpu_tests.xml'}"
    command = pytest(report, "--durations=10", *parallel(), *gpu_tests())
    return run(command, seconds, environment())


def sanitize(seconds: float) -> int:
    """A few tests of each kernel under memcheck, if the tool is there."""
    tool = find_sanitizer()
    if tool is None:
        sys.stderr.write("gpu_suite: no compute-sanitizer found: no kernel was checked by it.\n")
        return 0
    checked = [tool, "--tool", "memcheck", "--error-exitcode", str(_SANITIZER_FAILED)]
    # Libraries ask the driver for what it may not have; that is no error of a kernel.
    checked += ["--report-api-errors", "no"]
    # What torch caches would hide reads past the end of a tensor.
    variables = environment() | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    code = run([*checked, *pytest("-k", SANITIZED, str(KERNELS))], seconds, variables)
    if code == _NO_TESTS:
        sys.stderr.write(f"gpu_suite: no test is named {SANITIZED}: none was sanitized.\n")
    return code


def benchmark(output: Path, seconds: float) -> int:
    """The rows of all operations; ends itself, before it must be ended."""
    return _benchmark(output, seconds, min(420.0, seconds - 30))


def transducer(output: Path, seconds: float) -> int:
    """The rows of the transducer loss, with its largest batches, in all the time that is left."""
    return _benchmark(output, seconds, seconds - 30, "--op", "transducer_loss")


def _benchmark(output: Path, seconds: float, budget: float, *options: str) -> int:
    script = str(ROOT / "profiling" / "bench_ops.py")
    command = [sys.executable, script, "--budget-s", f"{max(10.0, budget):.0f}", *options]
    return run([*command, "--output", str(output / "ops.csv")], seconds, environment())


def main(arguments: list[str] | None = None) -> int:
    """Return 0 where all tests passed and rows were written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "profiling" / "results")
    parser.add_argument("--budget-s", type=float, default=530.0, help="for everything")
    parser.add_argument("--sanitize", action="store_true", help="memcheck on a few kernel tests")
    parser.add_argument("--no-bench", action="store_true", help="tests alone")
    parser.add_argument(
        "--transducer", action="store_true", help="its largest batches, instead of all operations"
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("gpu_suite: needs an NVIDIA GPU, and torch sees none.\n")
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget_s
    steps = {"tests": lambda left: test(options.output, left)}
    if options.sanitize:
        # The rows can be made again on another day; leave them a part.
        steps["sanitizer"] = lambda left: sanitize(min(left, max(60.0, left / 2)))
    if not options.no_bench:
        chosen = transducer if options.transducer else benchmark
        steps["benchmarks"] = lambda left: chosen(options.output, left)
    spent, code = [], 0
    for name, step in steps.items():
        begin = time.monotonic()
        code = step(deadline - begin)
        spent.append(f"{name} {time.monotonic() - begin:.0f} s")
        if code:
            spent[-1] += f" (failed: {code})"
            break
    sys.stdout.write(f"gpu_suite: {', '.join(spent)}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
