"""Resources and tensor core products of kernels that were compiled for a GPU.

Triton includes ``cuobjdump``, which reads the resources from the binary that runs.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import aot
from triton import backends

from effasr_kernels.runtime.launch import Launch

_ROWS_OF_WARP = 16
_LAYOUT = re.compile(
    r"^(#\w+) = #ttg\.nvidia_mma<\{.*?warpsPerCTA = \[(\d+), (\d+)\]", re.MULTILINE
)
_RESULT = re.compile(r"(?:tt\.dot|ttng\.warp_group_dot) .*-> tensor<(\d+)x(\d+)x\w+, (#\w+)>")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(?:@!?\w+ )?([\w.]+) ?(.*?) ;")
"""In SASS: address, operation, operands."""
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}
"""Maximum shared memory per block in bytes, by architecture (CUDA C++ guide, table 30)."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a compiled kernel."""

    registers: int  # registers per thread
    stack: int  # bytes per thread of spilled registers and local arrays; 0 without spills
    shared: int  # static and dynamic shared memory per block, in bytes
    matrix_instructions: int  # number of tensor core instructions in the PTX
    ttir: str  # the kernel in Triton's IR, before optimizations for a GPU
    ttgir: str  # the kernel in Triton's IR for GPUs, with the layouts of tensors
    ptx: str  # the PTX of the kernel


@dataclass(frozen=True, slots=True)
class Product:
    """A product of tensor cores in a kernel: sizes of the result, and warps along both."""

    rows: int
    columns: int
    warps_m: int
    warps_n: int

    @property
    def is_repeated(self) -> bool:
        """Whether several warps compute the same rows: a warp has 16 of them, or more."""
        return self.warps_m * _ROWS_OF_WARP > self.rows


def products_of(ttgir: str) -> list[Product]:
    """Return the products of a compiled kernel that tensor cores compute, in order."""
    warps = {name: (int(m), int(n)) for name, m, n in _LAYOUT.findall(ttgir)}
    return [
        Product(int(rows), int(columns), *warps[layout])
        for rows, columns, layout in _RESULT.findall(ttgir)
        if layout in warps
    ]


def overwritten_operands(sass: str) -> dict[str, set[int]]:
    """Return registers that ptxas 12.8 to 13.0 takes for free in a loop that needs them, by kernel.

    They are left operands of wgmma that a loop reads as they were before it, and yet writes.
    """
    overwritten = {}
    for name, code in re.findall(r"Function : (\w+)(.*?)(?=Function : |\Z)", sass, re.DOTALL):
        lines = [(int(at, 16), *rest) for at, *rest in _INSTRUCTION.findall(code)]
        jumps = [
            (at, int(to, 16)) for at, name, to in lines if name.startswith("BRA") and "," not in to
        ]
        loops = [[x for x in lines if to <= x[0] < at] for at, to in jumps]
        overwritten[name] = set().union(*map(_overwritten_in, loops))
    return overwritten


def _overwritten_in(loop: list[tuple[int, str, str]]) -> set[int]:
    held: set[int] = set()
    written: set[int] = set()
    for _, operation, operands in loop:
        if left := re.match(r"R\d+, R(\d+), gdesc", operands):
            held |= {*range(int(left[1]), int(left[1]) + 4)} - written
        if result := re.match(r"(?:P[\dT], )?R(\d+)", operands):
            columns = re.search(r"GMMA\.64x(\d+)", operation)
            words = 1 + bool(re.search(r"\.64|WIDE|88\.2", operation))
            words = 4 if re.search(r"\.128|88\.4", operation) else words
            size = int(columns[1]) // 2 if columns else words
            written |= {*range(int(result[1]), int(result[1]) + size)}
    return held & written


def cuobjdump(option: str, cubin: str | Path) -> str:
    tool = Path(backends.__file__).parent / "nvidia" / "bin" / "cuobjdump"
    command = [tool, option, cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources_of(launch: Launch, architecture: int) -> Resources:
    """Compile for ``sm_<architecture>``, such as 80, 90 or 100."""
    compiled = aot.compile_launch(launch, architecture)
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        # Registers, stack and static shared memory.
        printed = cuobjdump("-res-usage", file.name)
    usage = {name: int(n) for name, n in re.findall(r"(REG|STACK|SHARED):(\d+)", printed)}
    registers, stack, static = usage["REG"], usage["STACK"], usage["SHARED"]
    return Resources(
        registers=registers,
        stack=stack,
        shared=max(static, compiled.metadata.shared),
        matrix_instructions=len(re.findall(r"wgmma\.mma|mma\.sync|tcgen05\.mma", ptx)),
        ttir=compiled.asm["ttir"],
        ttgir=compiled.asm["ttgir"],
        ptx=ptx,
    )
