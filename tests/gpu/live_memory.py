"""How much memory is made in a block: by allocations, which a CPU has as a GPU has."""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """The most bytes alive at a time of what is made in the block, and of one tensor."""

    def __init__(self, *given: Tensor) -> None:
        """What is given does not count, which the interpreter wraps anew."""
        super().__init__()
        self.peak, self.largest = 0, 0
        self._given = {x.untyped_storage()._cdata for x in given}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage._cdata in self._given:
                    continue
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self._made = {key: x for key, x in self._made.items() if not x[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return out


class Sizes(TorchDispatchMode):
    """Writes down the bytes of each result of the dispatcher's operations, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                self.bytes.append((str(func), x.numel() * x.element_size()))
        return result
