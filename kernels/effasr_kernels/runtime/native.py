"""The kernels of ``csrc/`` for CPUs: one shared library in plain C, which ctypes loads.

It is built when the package is installed (``setup.py``), and knows neither torch nor Python: the
callers here describe tensors to it by pointers, and so check every dtype, shape and range before.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

import effasr_kernels
from effasr_kernels.runtime.checks import wrong
from effasr_kernels.runtime.dispatch import BackendUnavailable

LIBRARY, FAILURE = "_cpu.so", "_cpu_failure.txt"
"""What ``setup.py`` leaves in the package: the library, or the reason why it could not build it."""
HOW_TO_BUILD = "with a C++ compiler, pip install . builds it: csrc/README.md"
_INTERFACE = 2
"""Of the structures; as EFFASR_INTERFACE in csrc/interface.h."""
_NO_MEMORY = 1

POINTER = ctypes.c_void_p
INT32, INT64, FLOAT = ctypes.c_int32, ctypes.c_int64, ctypes.c_float


@functools.cache
def unsupported_reason() -> str | None:
    """The reason for which the library cannot run on this installation, or None."""
    found = _load()
    return found if isinstance(found, str) else None


def run(op: str, name: str, *structures: ctypes.Structure) -> None:
    """Call a function of the library, on as many threads as torch would take.

    Args:
        op: The operation, for messages.
        name: Of the function.
        structures: Its arguments. The tensors that they point to must be alive.

    Raises:
        BackendUnavailable: The library cannot run; see `unsupported_reason`.
        MemoryError: The function found too little memory to work in.
    """
    library = _load()
    if isinstance(library, str):
        raise BackendUnavailable(f"{op}: the CPU kernels cannot run ({library}; {HOW_TO_BUILD}).")
    code = getattr(library, name)(*map(ctypes.byref, structures), torch.get_num_threads())
    if code == _NO_MEMORY:
        raise MemoryError(f"{op}: too little memory to work in.")
    if code:
        raise RuntimeError(f"{op}: {name} failed with code {code}.")


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor's elements begin; None for None."""
    return None if tensor is None else tensor.data_ptr()


def check(
    op: str,
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...] | torch.Size | None = None,
    *,
    contiguous: bool = True,
) -> None:
    """Check what the library takes for granted of a tensor.

    Args:
        op: The operation, for messages.
        name: The argument, for messages.
        tensor: Its value.
        dtype: What its dtype must be.
        shape: What its shape must be; anything by default.
        contiguous: Whether it must be contiguous.

    Raises:
        ValueError: It is otherwise, or not on a CPU.
    """
    if tensor.device.type != "cpu":
        raise wrong(op, name, "be on a CPU", f"on {tensor.device}")
    if tensor.dtype != dtype:
        raise wrong(op, name, f"be {str(dtype).removeprefix('torch.')}", tensor.dtype)
    if shape is not None and tensor.shape != shape:
        raise wrong(op, name, f"have shape {tuple(shape)}", tuple(tensor.shape))
    if contiguous and not tensor.is_contiguous():
        rule = "be contiguous, as .contiguous() makes it"
        raise wrong(op, name, rule, f"one with strides {tensor.stride()}")


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or the reason for which it cannot be used."""
    # Tests and profilers append the folder of a build of their own.
    folders = [Path(folder) for folder in reversed(effasr_kernels.__path__)]
    path = next((x / LIBRARY for x in folders if (x / LIBRARY).exists()), None)
    if path is None:
        failures = [x / FAILURE for x in folders if (x / FAILURE).exists()]
        if failures:
            reason = failures[0].read_text(encoding="utf-8").strip()
            return f"effasr_kernels/{LIBRARY} could not be built: {reason}"
        return f"effasr_kernels/{LIBRARY} was not built"
    try:
        library = ctypes.CDLL(str(path))
        interface = library.effasr_interface()
    except (OSError, AttributeError) as error:
        return f"effasr_kernels/{LIBRARY} cannot be loaded: {error}"
    if interface != _INTERFACE:
        return (
            f"effasr_kernels/{LIBRARY} has interface {interface}, but {_INTERFACE} is needed: "
            "build it again"
        )
    return library
