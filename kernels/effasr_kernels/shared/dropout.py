"""Dropout that a seed repeats, so that a recomputed forward drops the same values."""

from __future__ import annotations

import torch
from torch import Tensor

_SEEDS = 2**62


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed from the global generator of a device, and leave it there: int64 ().

    So nobody waits for it, and a CUDA graph draws another at each replay.
    """
    return torch.randint(_SEEDS, (), device=device)


def seed_for(dropout: float, seed: int | Tensor | None, device: torch.device) -> Tensor | None:
    """The seed of a call, int64 (): drawn if none is given, and None without dropout.

    A given one stays on the host: to copy it to a GPU would wait.
    """
    if not dropout:
        return None
    if seed is None:
        return draw_seed(device)
    return seed if isinstance(seed, Tensor) else torch.tensor(seed)


def seed_tensor(seed: Tensor | None, device: torch.device) -> Tensor:
    """The seed where kernels read it: int64 (1,), on the device; 0 where there is none."""
    if seed is not None and seed.device == device:
        return seed.reshape(1)
    return torch.full((1,), 0 if seed is None else int(seed), dtype=torch.int64, device=device)


class Dropout:
    """Drops values with a probability, and scales the rest so that the mean stays.

    Sequences draw in turn. So which values fall in one depends on the seed and on the sizes of
    those before it, not on those after it, nor on a tail; in another order, others fall.
    """

    def __init__(self, probability: float, seed: Tensor | None, device: torch.device):
        """Start the generator; one object serves one call of an operation.

        Args:
            probability: In [0, 1). At zero nothing is drawn.
            seed: Where the generator starts; needed unless ``probability`` is zero.
            device: Of the values.
        """
        self.probability = probability
        self._generator = None
        if probability > 0 and seed is not None:
            self._generator = torch.Generator(device)
            self._generator.manual_seed(int(seed))

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x`` with some values set to zero."""
        if self.probability == 0:
            return x
        keep = torch.empty_like(x, requires_grad=False)
        keep.bernoulli_(1 - self.probability, generator=self._generator)
        return x * keep.div_(1 - self.probability)
