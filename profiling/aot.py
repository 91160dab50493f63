"""Compilation of recorded launches for a GPU that need not be present.

A launch is compiled with the types, constants and alignments that it would have on a GPU, so that
the binary is the one that runs. Triton includes the assembler.
"""

import os
from typing import Any

import torch
from torch import Tensor
from triton import knobs
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


def compile_launch(launch: Launch, architecture: int) -> CompiledKernel:
    """Compile for ``sm_<architecture>``, such as 80, 90 or 100."""
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


def compile_to_ptx(launch: Launch, architecture: int) -> tuple[str, int]:
    """Return the PTX, with lines of the source, and the dynamic shared memory in bytes."""
    # The assembler would take a fifth of the time.
    with knobs.runtime.scope(), knobs.cache.scope():
        knobs.runtime.add_stages_inspection_hook = _leave_out_assembler  # type: ignore[assignment]
        # The key of Triton 3.6 does not depend on the hook: it would take these files for whole.
        knobs.cache.dir = os.path.join(knobs.cache.dir, "ptx")
        compiled = compile_launch(launch, architecture)
    return compiled.asm["ptx"], compiled.metadata.shared


def _leave_out_assembler(*arguments: Any) -> tuple[str, str]:
    """Called by Triton 3.7 without arguments for a part of the key, by both with the stages."""
    if arguments:
        _, stages, *_ = arguments
        stages["cubin"] = lambda ptx, metadata: b""
    return "without cubin", "without cubin"


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
