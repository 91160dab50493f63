"""Building the CPU kernels as setup.py does, in a folder of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from effasr_kernels.runtime.native import LIBRARY

ROOT = Path(__file__).parents[2]


def run(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python on this checkout, with these environment variables more."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EFFASR_BUILD")}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    defaults = {"PYTHONPATH": paths, "MAX_JOBS": "2", "EFFASR_BUILD_CUDA": "0"}
    environment |= defaults | variables
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=290
    )


def build(folder: Path) -> Path:
    """Build in an empty folder; returns where packages lie."""
    # Without pyproject.toml any setuptools will do.
    shutil.copy(ROOT / "setup.py", folder)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    places = "--build-lib", "lib", "--build-temp", "temporary"
    done = run("setup.py", "build_ext", *places, cwd=folder, EFFASR_BUILD_CPP="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "lib"


def installed() -> Path | None:
    """The library beside the package, or None if a source or its build is younger than it."""
    library = ROOT / "kernels" / "effasr_kernels" / LIBRARY
    sources = [ROOT / "setup.py", *ROOT.glob("csrc/**/*.cpp"), *ROOT.glob("csrc/**/*.h")]
    if not library.exists():
        return None
    made = library.stat().st_mtime
    return library if all(path.stat().st_mtime <= made for path in sources) else None
