"""The .cu files as nvcc compiles them, alone, for GPUs that need not be there."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
ARCHITECTURES = ("80", "90")
KERNELS = {
    "transducer_lattice": {"sweep", "join", "spread"},
    "ctc_lattice": {"sweep", "join", "spread", "sum_blanks"},
}
# With 512 threads a block, 128 registers are there for each.
MOST_REGISTERS, MOST_SHARED = 128, 1024


def test_every_source_is_tested() -> None:
    assert {path.stem for path in CSRC.glob("*.cu")} == set(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_needs_no_stack_and_no_torch(name: str, tmp_path: Path) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("no nvcc on this machine")
    targets = [f"-gencode=arch=compute_{x},code=sm_{x}" for x in ARCHITECTURES]
    command = [compiler, "-O3", "-std=c++17", "-Werror", "all-warnings", "-Xptxas", "-v", *targets]
    command += ["-c", str(CSRC / f"{name}.cu"), "-o", str(tmp_path / "object.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    report = re.findall(
        r"entry function '(\w+)' for 'sm_(\d+)'.*?(\d+) bytes stack frame, (\d+) bytes spill "
        r"stores, (\d+) bytes spill loads.*?Used (\d+) registers(?:.*?(\d+) bytes smem)?",
        re.sub(r"\n(?!.*entry function)", " ", done.stderr),
    )
    assert {architecture for _, architecture, *_ in report} == set(ARCHITECTURES)
    for architecture in ARCHITECTURES:
        own = [x for x in report if x[1] == architecture]
        found = {k for k in KERNELS[name] for x in own if re.search(rf"\d{k}(I|E)", x[0])}
        assert found == KERNELS[name]
    for kernel, architecture, stack, stores, loads, registers, shared in report:
        what = f"{kernel} for sm_{architecture}"
        assert (stack, stores, loads) == ("0", "0", "0"), what
        assert int(registers) <= MOST_REGISTERS, what
        assert int(shared or 0) <= MOST_SHARED, what
