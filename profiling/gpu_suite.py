"""Everything that needs a GPU, in one command: the GPU tests first, then the benchmarks.

    python profiling/gpu_suite.py [--output DIR]

Stops before the benchmarks where a test fails: a speed counts only behind green tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
DATA_PACKAGES = ("lhotse", "sentencepiece", "soundfile", "soxr")


def gpu_tests() -> list[str]:
    """The files with GPU tests; those of the data, only where its packages are installed."""
    absent = [name for name in DATA_PACKAGES if importlib.util.find_spec(name) is None]
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        if "mark.gpu" not in path.read_text(encoding="utf-8"):
            continue
        if absent and TESTS / "data" in path.parents:
            sys.stderr.write(f"gpu_suite: left out {path}: needs {', '.join(absent)}.\n")
            continue
        found.append(str(path))
    return found


def main() -> int:
    """Return 0 where all tests passed and all rows were written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "profiling" / "results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("gpu_suite: needs an NVIDIA GPU, and torch sees none.\n")
        return 2
    commands = [
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *gpu_tests()],
        [
            sys.executable,
            str(ROOT / "profiling" / "bench_ops.py"),
            "--output",
            str(options.output / "ops.csv"),
        ],
    ]
    for command in commands:
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
