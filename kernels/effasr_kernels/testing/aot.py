"""Compilation of recorded launches for a GPU that need not be present, and their resource usage.

A launch is compiled with the types, constants and alignments that it would have on a GPU, so that
tests check the same binary that runs. Triton includes the assembler and ``cuobjdump``.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import backends, knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler import compile as compile_source
from triton.runtime import JITFunction

from effasr_kernels.runtime.launch import Launch

_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
_ALIGNED = [["tt.divisibility", 16]]
_ROWS_OF_WARP = 16
_LAYOUT = re.compile(
    r"^(#\w+) = #ttg\.nvidia_mma<\{.*?warpsPerCTA = \[(\d+), (\d+)\]", re.MULTILINE
)
_RESULT = re.compile(r"(?:tt\.dot|ttng\.warp_group_dot) .*-> tensor<(\d+)x(\d+)x\w+, (#\w+)>")
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


def products(ttgir: str) -> list[Product]:
    """Return the products of a compiled kernel that tensor cores compute, in order."""
    warps = {name: (int(m), int(n)) for name, m, n in _LAYOUT.findall(ttgir)}
    return [
        Product(int(rows), int(columns), *warps[layout])
        for rows, columns, layout in _RESULT.findall(ttgir)
        if layout in warps
    ]


def signature(launch: Launch) -> tuple[dict[str, Any], dict[str, Any], tuple[tuple[int, ...], ...]]:
    """Types of all arguments, values of the constants, and places of arguments that 16 divides."""
    # The type of a tuple of tensors is a tuple. A place is the index of an argument, followed in a
    # tuple by that of the tensor. Triton compiles a kernel for each combination of these and the
    # options.
    types, constants, aligned = {}, dict(launch.constants), []
    for number, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            types[name] = "constexpr"
            continue
        value = launch.args[name]
        free = parameter.do_not_specialize
        if value is None or (isinstance(value, int) and value == 1 and not free):
            types[name], constants[name] = "constexpr", value
            continue
        types[name] = _type_of(value)
        if isinstance(value, tuple):
            aligned += [(number, index) for index in range(len(value))]
            continue
        multiple = isinstance(value, Tensor) or (type(value) is int and value % 16 == 0)
        if multiple and not free:
            aligned.append((number,))
    return types, constants, tuple(aligned)


def key(launch: Launch) -> tuple[Any, ...]:
    """A key that is equal for two launches that run the same binary."""
    types, constants, aligned = signature(launch)
    options = tuple(sorted(launch.options.items()))
    return launch.kernel.fn.__name__, tuple(types.items()), repr(constants), aligned, options


def compile_launch(launch: Launch, architecture: int) -> Resources:
    """Compile for ``sm_<architecture>``, such as 80, 90 or 100."""
    compiled = _compile(launch, architecture)
    ptx = compiled.asm["ptx"]
    registers, stack, static = _usage(compiled.asm["cubin"])
    return Resources(
        registers=registers,
        stack=stack,
        shared=max(static, compiled.metadata.shared),
        matrix_instructions=len(re.findall(r"wgmma\.mma|mma\.sync|tcgen05\.mma", ptx)),
        ttir=compiled.asm["ttir"],
        ttgir=compiled.asm["ttgir"],
        ptx=ptx,
    )


def compile_to_ptx(launch: Launch, architecture: int) -> tuple[str, int]:
    """Return the PTX, with lines of the source, and the dynamic shared memory in bytes."""
    # The assembler would take a fifth of the time.
    with knobs.runtime.scope(), knobs.cache.scope():
        knobs.runtime.add_stages_inspection_hook = _leave_out_assembler  # type: ignore[assignment]
        # The key of Triton 3.6 does not depend on the hook: it would take these files for whole.
        knobs.cache.dir = os.path.join(knobs.cache.dir, "ptx")
        compiled = _compile(launch, architecture)
    return compiled.asm["ptx"], compiled.metadata.shared


def _leave_out_assembler(*arguments: Any) -> tuple[str, str]:
    """Called by Triton 3.7 without arguments for a part of the key, by both with the stages."""
    if arguments:
        _, stages, *_ = arguments
        stages["cubin"] = lambda ptx, metadata: b""
    return "without cubin", "without cubin"


def _compile(launch: Launch, architecture: int) -> CompiledKernel:
    types, constants, aligned = signature(launch)
    if not isinstance(launch.kernel, JITFunction):
        raise RuntimeError("Kernels cannot be compiled under TRITON_INTERPRET=1: unset it.")
    source = ASTSource(
        fn=launch.kernel,
        signature=types,
        constexprs=constants,
        attrs=dict.fromkeys(aligned, _ALIGNED),
    )
    target = GPUTarget("cuda", architecture, 32)
    return compile_source(source, target=target, options=dict(launch.options))


def _type_of(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_type_of, value))
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"a kernel cannot take a {type(value).__name__}")


def _usage(cubin: bytes) -> tuple[int, int, int]:
    """Registers, stack and static shared memory, from ``cuobjdump -res-usage``."""
    tool = Path(backends.__file__).parent / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = {name: int(n) for name, n in re.findall(r"(REG|STACK|SHARED):(\d+)", printed)}
    return usage["REG"], usage["STACK"], usage["SHARED"]
