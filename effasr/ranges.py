"""Named ranges for a profiler's time line; free, and without any import, while off."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

_NOTHING = nullcontext()
_make: Callable[[str], AbstractContextManager] | None = None


def range(name: str) -> AbstractContextManager:
    """A context whose duration shows under ``name`` once `enable` was called.

    Names are registered with the profiler for good, so they must be few: no step numbers.
    """
    return _NOTHING if _make is None else _make(name)


def enable(library: Literal["torch", "nvtx"] = "torch") -> None:
    """Show ranges from now on.

    Args:
        library: ``torch``: torch.cuda.nvtx. ``nvtx``: the package of that name, in domain
            ``effasr``; its versions from 0.2.12 lose every range under Nsight Systems of 2023
            and older.

    Raises:
        RuntimeError: ``torch`` is built without CUDA, and so without NVTX.
    """
    global _make
    if library == "nvtx":
        nvtx = importlib.import_module("nvtx")
        _make = lambda name: nvtx.annotate(message=name, domain="effasr")
        return
    torch_nvtx = importlib.import_module("torch.cuda.nvtx")
    with torch_nvtx.range("effasr"):
        _make = torch_nvtx.range


def disable() -> None:
    """Show no ranges from now on."""
    global _make
    _make = None
