"""Loads the CPU kernels of ``csrc/``: a shared library with a C interface, called by ctypes.

``setup.py`` builds the library when the package is installed. It depends neither on torch nor on
Python: callers pass pointers to tensors, so they check every dtype, shape and range before.
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

import effasr_kernels
from effasr_kernels.runtime.checks import wrong
from effasr_kernels.runtime.dispatch import BackendUnavailable

LIBRARY, FAILURE = "_cpu.so", "_cpu_failure.txt"
"""Files that ``setup.py`` writes to the package: the library, or why its build failed."""
HOW_TO_BUILD = "with a C++ compiler, pip install . builds it: csrc/README.md"
_INTERFACE = 3
"""Version of the structures; equals EFFASR_INTERFACE in csrc/interface.h."""
_NO_MEMORY = 1

POINTER = ctypes.c_void_p
INT32, INT64, FLOAT = ctypes.c_int32, ctypes.c_int64, ctypes.c_float


@functools.cache
def unsupported_reason() -> str | None:
    """The reason why the library cannot run on this installation, or None."""
    library = _load()
    return library if isinstance(library, str) else None


def lacks(name: str) -> str | None:
    """The reason why the library has no function of this name, or None."""
    library = _load()
    if isinstance(library, str) or hasattr(library, name):
        return None
    return f"effasr_kernels/{LIBRARY} is older than {name}: build it again ({HOW_TO_BUILD})"


def refusal(x: Tensor) -> str | None:
    """The reason why the CPU library does not support a tensor, or None."""
    if x.device.type != "cpu":
        return "supports only CPUs"
    if x.dtype == torch.float64:
        return "float64 is for the reference"
    reason = unsupported_reason()
    return None if reason is None else f"{reason} ({HOW_TO_BUILD})"


def run(op: str, name: str, *structures: ctypes.Structure) -> None:
    """Call a function of the library with `torch.get_num_threads` threads."""
    # The caller keeps the tensors alive to which the structures point.
    library = _load()
    if isinstance(library, str):
        raise BackendUnavailable(f"{op}: the CPU kernels cannot run ({library}; {HOW_TO_BUILD}).")
    code = getattr(library, name)(*map(ctypes.byref, structures), torch.get_num_threads())
    if code == _NO_MEMORY:
        raise MemoryError(f"{op}: {name} could not allocate its workspace.")
    if code:
        raise RuntimeError(f"{op}: {name} failed with code {code}.")


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def check(
    op: str,
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,  # required dtype
    shape: tuple[int, ...] | torch.Size | None = None,  # required shape; None accepts any
    *,
    contiguous: bool = True,  # whether the tensor must be contiguous
) -> None:
    if tensor.device.type != "cpu":
        raise wrong(op, name, "be on a CPU", f"on {tensor.device}")
    if tensor.dtype != dtype:
        raise wrong(op, name, f"be {str(dtype).removeprefix('torch.')}", tensor.dtype)
    if shape is not None and tensor.shape != shape:
        raise wrong(op, name, f"have shape {tuple(shape)}", tuple(tensor.shape))
    if contiguous and not tensor.is_contiguous():
        rule = "be contiguous (call .contiguous())"
        raise wrong(op, name, rule, f"a tensor with strides {tensor.stride()}")


@functools.cache
def _load() -> ctypes.CDLL | str:
    return load_library(LIBRARY, FAILURE, "effasr_interface", _INTERFACE)


def load_library(name: str, failure: str, version: str, expected: int) -> ctypes.CDLL | str:
    """Return a library of the package, or the reason why it cannot be used."""
    # Tests and profilers append the folder of another build.
    folders = [Path(folder) for folder in reversed(effasr_kernels.__path__)]
    path = next((x / name for x in folders if (x / name).exists()), None)
    if path is None:
        failures = [x / failure for x in folders if (x / failure).exists()]
        if failures:
            reason = failures[0].read_text(encoding="utf-8").strip()
            return f"effasr_kernels/{name} could not be built: {reason}"
        return f"effasr_kernels/{name} was not built"
    try:
        library = ctypes.CDLL(str(path))
        interface = getattr(library, version)()
    except (OSError, AttributeError) as error:
        return f"effasr_kernels/{name} cannot be loaded: {error}"
    if interface != expected:
        return (
            f"effasr_kernels/{name} has interface {interface}, but {expected} is needed: "
            "build it again"
        )
    return library
