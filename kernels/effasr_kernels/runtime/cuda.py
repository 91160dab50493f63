"""Launches of the CUDA C++ kernels of ``csrc/``: on a GPU, recorded, or emulated.

``setup.py`` builds them with nvcc into a library with a C interface, which needs neither torch nor
Python. `effasr_kernels.runtime.launch.diverted` takes these launches as it does those of Triton.
"""

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.runtime import launch as triton_launch
from effasr_kernels.runtime import native

LIBRARY, FAILURE = "_cuda.so", "_cuda_failure.txt"
"""Files that ``setup.py`` writes to the package: the library, or why its build failed."""
INTERFACE = 4
"""Version of the structures; equals EFFASR_CUDA_INTERFACE in csrc/attention_cuda.h."""
_HOW_TO_BUILD = "with nvcc, EFFASR_BUILD_CUDA=1 pip install . builds it: csrc/README.md"


@dataclass(slots=True)
class CudaLaunch:
    """A launch of a kernel that is a template of a dtype and a width."""

    source: str  # name of its file in ``csrc/``, without suffix
    kernel: str
    dtype: torch.dtype
    width: int
    grid: tuple[int, int]
    call: ctypes.Structure  # the kernel's only argument
    tensors: Mapping[str, Tensor]  # to which the structure points
    shared_bytes: int  # dynamic


def launch(made: CudaLaunch) -> None:
    """Launch a kernel, unless its grid is empty."""
    take = triton_launch.taker()
    if take is not None:
        take(made)
        return
    if 0 in made.grid:
        return
    library = load()
    if isinstance(library, str):
        raise RuntimeError(library)
    device = next(iter(made.tensors.values())).device
    with torch.cuda.device(device):
        code = getattr(library, f"effasr_{made.kernel}")(
            ctypes.byref(made.call),
            int(made.dtype == torch.bfloat16),
            made.width,
            made.grid[0],
            made.shared_bytes,
            ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream),
        )
    if code:
        raise RuntimeError(f"{made.kernel}: CUDA reports error {code}.")


def refusal(x: Tensor) -> str | None:
    """The reason why these kernels do not support a tensor, or None."""
    if triton_launch.INTERPRETED:
        return "there is no interpreter of CUDA C++"
    reason = triton_launch.refusal(x)
    if reason is None and triton_launch.taker() is None and isinstance(library := load(), str):
        reason = f"{library} ({_HOW_TO_BUILD})"
    return reason


@functools.cache
def load() -> ctypes.CDLL | str:
    """Return the library, or the reason why it cannot be used."""
    return native.load_library(LIBRARY, FAILURE, "effasr_cuda_interface", INTERFACE)
