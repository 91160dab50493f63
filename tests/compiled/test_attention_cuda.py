"""What ptxas makes of the kernels in CUDA C++: no stack, and blocks that fit a multiprocessor."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import effasr_kernels

CSRC = Path(effasr_kernels.__file__).parents[2] / "csrc"


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("source", ["attention_forward", "attention_backward"])
@pytest.mark.parametrize("architecture", ["80", "90a", "100"])
@pytest.mark.representative(architecture="90a")
def test_no_kernel_of_nvcc_spills(architecture: str, source: str, tmp_path: Path) -> None:
    command = "nvcc", "-std=c++17", "-O3", f"-arch=sm_{architecture}", "-cubin", "-Xptxas", "-v"
    done = subprocess.run(
        [*command, str(CSRC / f"{source}.cu"), "-o", str(tmp_path / "kernels.cubin")],
        check=True,
        capture_output=True,
        text=True,
    )
    text = done.stderr
    names = re.findall(
        r"Compiling entry function '\w*?\d(attention_\w+?)INS_\d(\w+)ELi(\d+)E", text
    )
    stack = [int(x) for x in re.findall(r"(\d+) bytes stack frame", text)]
    registers = [int(x) for x in re.findall(r"Used (\d+) registers", text)]
    assert len(set(names)) == len(stack) == len(registers) == (4 if "forward" in source else 20)
    assert not any(stack), dict(zip(names, stack, strict=True))
    for (name, _, width), count in zip(names, registers, strict=True):
        # Blocks that shared memory lets a multiprocessor have, of 128 and of 256 threads.
        if name == "attention_forward":
            assert count <= (168 if width == "64" else 255)
        elif width == "64" and architecture != "80":
            assert count <= 128
