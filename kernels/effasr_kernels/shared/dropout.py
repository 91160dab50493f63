"""Dropout determined by a seed, so that a recomputed forward drops the same values."""

from collections.abc import Sequence

import torch
from torch import Tensor

_SEEDS = 2**62

# Of Philox 4 x 32, with the number of rounds of `effasr_kernels.shared.philox`.
_ROUNDS = 7
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed, int64 (), from the global generator of a device."""
    # The seed stays on the device, so that the host does not wait for it and a CUDA graph draws a
    # new one at each replay.
    return torch.randint(_SEEDS, (), device=device)


def draw_seeds(count: int, device: torch.device) -> tuple[Tensor, ...]:
    """Draw several seeds as `draw_seed`, int64 () each, in one launch."""
    # Each at a multiple of 16 bytes: for other addresses kernels would be compiled a second time.
    return torch.randint(_SEEDS, (count, 2), device=device)[:, 0].unbind()


def realised_rate(dropout: float) -> float:
    """The nearest multiple of 1/256 below 1, which is the rate that kernels drop at."""
    # Kernels compare 8 random bits with it, and the factor of what is kept is of this rate.
    return min(round(dropout * 256), 255) / 256


def seed_for(dropout: float, seed: int | Tensor | None, device: torch.device) -> Tensor | None:
    """The seed of a call, int64 (): drawn if none is given, and None without dropout."""
    # An int becomes a tensor on the host, as a copy to a GPU would wait.
    if not dropout:
        return None
    if seed is None:
        return draw_seed(device)
    return seed if isinstance(seed, Tensor) else torch.tensor(seed)


def seed_tensor(seed: Tensor | None, device: torch.device) -> Tensor:
    """The seed on the device, for kernels: int64 (1,); 0 for None."""
    if seed is not None and seed.device == device:
        return seed.reshape(1)
    return torch.full((1,), 0 if seed is None else int(seed), dtype=torch.int64, device=device)


def kept_elements(
    seed: Tensor | None, shape: Sequence[int], probability: float, offset: int
) -> Tensor:
    """Which elements of a matrix survive dropout, bool (rows, columns), as kernels decide it."""
    # See `effasr_kernels.shared.philox.keep_elements`.
    assert seed is not None
    rows, columns = shape
    device = seed.device
    low = 0xFFFFFFFF
    i = torch.arange(-(-rows // 4), device=device)[:, None]
    j = torch.arange(-(-columns // 4), device=device)
    seed_bits = seed.reshape(()).long()
    words = [
        i + 0 * j,
        j + 0 * i,
        torch.full_like(i + j, offset & low),
        torch.full_like(i + j, low),
    ]
    keys = [seed_bits & low, (seed_bits >> 32) & low]
    for _ in range(_ROUNDS):
        # Products wrap around in int64; both halves are right even where the sign is not.
        a, b = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            ((b >> 32) & low) ^ words[1] ^ keys[0],
            b & low,
            ((a >> 32) & low) ^ words[3] ^ keys[1],
            a & low,
        ]
        keys = [(key + step) & low for key, step in zip(keys, _KEY_STEPS, strict=True)]
    by_column = torch.stack(words, -1).flatten(1)
    numbers = torch.stack([by_column >> 8 * row & 0xFF for row in range(4)], 1).flatten(0, 1)
    return (numbers >= round(probability * 256))[:rows, :columns]


class Dropout:
    """Drops values with a probability, and scales the rest so that the mean is unchanged.

    Sequences draw from one generator in order. So the values dropped in a sequence depend on the
    seed and on the sizes of the sequences before it, but not on those after it or on the tail.
    """

    def __init__(self, probability: float, seed: Tensor | None, device: torch.device):
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
