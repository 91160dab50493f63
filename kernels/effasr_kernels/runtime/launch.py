"""Launches of Triton kernels: on a GPU, in Triton's interpreter, or recorded.

Under ``TRITON_INTERPRET=1`` kernels run on the CPU, slowly, in Triton's interpreter. Inside
`recording` they do not run: the launches are recorded, and `profiling/aot.py` compiles exactly
these launches for a GPU that need not be present.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, which is fixed when their module is imported."""

_OLDEST = (8, 0)
_WITHOUT_GPU = (9, 0)
_MULTIPROCESSORS = 132


@dataclass(slots=True)
class Launch:
    kernel: Any  # a function decorated by `triton.jit`
    grid: tuple[int, ...]  # programs along each axis
    values: tuple[Any, ...]  # the run-time arguments in order
    constants: dict[str, Any]  # the compile-time arguments by name
    options: dict[str, Any]  # compiler options such as `num_warps`
    # Tensors whose addresses are in a table; their bytes count where they are read and written.
    read: Sequence[Tensor] = ()
    written: Sequence[Tensor] = ()

    @property
    def args(self) -> dict[str, Any]:
        return dict(zip(self.kernel.arg_names, self.values, strict=False))


class _Recorder:
    take: Callable[[Any], object] | None = None  # of a `Launch`, or of one of CUDA C++
    capability: tuple[int, int] = _WITHOUT_GPU


@contextmanager
def recording(capability: tuple[int, int] = _WITHOUT_GPU) -> Iterator[list[Launch]]:
    """Record launches instead of running them; the contents of their outputs are undefined."""
    launches: list[Launch] = []  # configurations are chosen for a GPU of this capability
    with diverted(launches.append, capability):
        yield launches


@contextmanager
def diverted(
    take: Callable[[Any], object] | None, capability: tuple[int, int] = _WITHOUT_GPU
) -> Iterator[None]:
    """Pass launches to a function; None runs them, also inside another `diverted`."""
    previous = _Recorder.take, _Recorder.capability
    _Recorder.take, _Recorder.capability = take, capability
    try:
        yield
    finally:
        _Recorder.take, _Recorder.capability = previous


def taker() -> Callable[[Any], object] | None:
    """The function that takes launches instead of a GPU, or None."""
    return _Recorder.take


def launch(
    kernel: Any,  # a function decorated by `triton.jit`; compile-time arguments come last
    grid: Sequence[int],  # programs along each axis, known to the host
    *args: Any,  # tensors, tuples of tensors, numbers or None; at least one is a tensor
    num_warps: int = 4,  # warps per program
    num_stages: int = 2,  # stages of the software pipeline of loads
    maxnreg: int | None = None,  # maximum registers per thread; None lets the compiler choose
    # Tensors that the kernel reaches through a table of addresses. Not declared so: to a type
    # checker they would take the numbers of the dictionaries that callers unpack.
    read: Any = (),
    written: Any = (),
    **constants: Any,
) -> None:
    """Launch a kernel, unless its grid is empty."""
    # No length may be among the constants, as every new value compiles the kernel again.
    # Allows fused multiply-adds, which later versions of Triton disable by default.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    if maxnreg is not None:
        options["maxnreg"] = maxnreg
    if _Recorder.take is not None:
        _Recorder.take(Launch(kernel, tuple(grid), args, constants, options, read, written))
        return
    if 0 in grid:
        return
    if not INTERPRETED:
        # Triton launches on the current device, which may differ from the tensors' device.
        device = next(x.device for x in args if isinstance(x, Tensor))
        # To set the device takes 4 of the 31 us of a launch (host of an H200).
        is_current = device.index == torch.cuda.current_device()
        with nullcontext() if is_current else torch.cuda.device(device):
            kernel[tuple(grid)](*args, **constants, **options)
        return
    if any(isinstance(x, Tensor) and x.dtype == torch.bfloat16 for x in args):
        raise RuntimeError(
            f"{kernel.fn.__name__}: Triton's interpreter computes bfloat16 wrongly: use float32 or "
            "float16, or unset TRITON_INTERPRET."
        )
    kernel[tuple(grid)](*args, **constants)


def ceil_div(count: int, divisor: int) -> int:
    """``count / divisor``, rounded up; of numbers that are known when a call is launched."""
    return -(-count // divisor)


def unit_stride(x: Tensor) -> Tensor:
    """The tensor, or a copy with contiguous rows (channels of its last dimension)."""
    return x if x.stride(-1) == 1 else x.contiguous()


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def serves_cpu() -> bool:
    """Whether kernels serve tensors on the CPU: interpreted, recorded or emulated."""
    return INTERPRETED or _Recorder.take is not None


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability for which to choose a configuration: (9, 0) for an H100 or H200."""
    if _Recorder.take is not None:
        return _Recorder.capability
    if device.type != "cuda":
        return _WITHOUT_GPU
    return torch.cuda.get_device_capability(device)


def multiprocessors(device: torch.device) -> int:
    """Number of streaming multiprocessors; an H200's if there is no GPU."""
    if _Recorder.take is not None or device.type != "cuda":
        return _MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def refusal(x: Tensor) -> str | None:
    """The reason why Triton does not support a tensor, or None."""
    if x.dtype == torch.float64:
        return "float64 is for the reference"
    if _Recorder.take is not None:
        return None
    if INTERPRETED:
        # The interpreter would copy from the GPU and back, and a test would not test the GPU.
        if x.device.type != "cpu":
            return "TRITON_INTERPRET=1 is for tensors on the CPU"
        if x.dtype == torch.bfloat16:
            return "Triton's interpreter computes bfloat16 wrongly"
        return None
    if x.device.type != "cuda":
        return "needs an NVIDIA GPU (or TRITON_INTERPRET=1, to test)"
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU"
    if torch.cuda.is_available() and capability(x.device) < _OLDEST:
        return "needs compute capability 8.0, an A100, or later"
    return None
