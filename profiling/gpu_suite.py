"""Everything that needs a GPU, in one command: the GPU tests first, then the benchmarks.

    python profiling/gpu_suite.py [--output DIR]

Stops before the benchmarks where a test fails: a speed counts only behind green tests.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"


def main() -> int:
    """Return 0 where all tests passed and all rows were written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "profiling" / "results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("gpu_suite: needs an NVIDIA GPU, and torch sees none.\n")
        return 2
    # Only files that have such tests: the others may need packages that this machine lacks.
    tests = [str(path) for path in TESTS.rglob("test_*.py") if "mark.gpu" in path.read_text()]
    commands = [
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *tests],
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
