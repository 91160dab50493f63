"""The most memory that a call needs, on a GPU and on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Return the most memory during a call, beyond what was there before."""
    if device.type != "cuda":
        with Alive() as alive:
            call()
        return alive.peak
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class Alive(TorchDispatchMode):
    """The most bytes alive at a time of what is made in the block; for a CPU, which counts none.

    It sees what operations return, not what they use inside, so operations registered with
    `torch.library` have to be called past the dispatcher.
    """

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it made."""
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for x in _tensors(result):
            storage = x.untyped_storage()
            if storage._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: x for key, x in self._made.items() if not x[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return [x for part in tree for x in _tensors(part)] if isinstance(tree, (tuple, list)) else []
