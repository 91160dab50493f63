"""The dropout of attention's kernels, computed by numpy, in place of the references' own."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def philox(key: int, counters: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Philox 4x32 with 7 rounds: Salmon et al., 2011, https://doi.org/10.1145/2063384.2063405."""
    word = np.uint64(2**32 - 1)
    c = [x.astype(np.uint64) for x in counters]
    k = [key & 2**32 - 1, key >> 32 & 2**32 - 1]
    for _ in range(7):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [b >> 32 ^ c[1] ^ np.uint64(k[0]), b & word, a >> 32 ^ c[3] ^ np.uint64(k[1]), a & word]
        k = [(k[0] + 0x9E3779B9) & 2**32 - 1, (k[1] + 0xBB67AE85) & 2**32 - 1]
    return c


def kept_weights(seed, sequence, heads, rows, columns, probability):
    """Which weights of a sequence survive: bool (heads, rows, columns)."""
    axes = (np.arange(n, dtype=np.uint64) for n in (heads, rows, columns))
    h, i, j = np.meshgrid(*axes, indexing="ij")
    counters = i // 16 * 8 + i % 8, j // 32 * 4 + j % 8 // 2, h, h * 0 + sequence
    word = (j // 16 % 2 * 2 + j % 2).astype(np.int64)
    byte = i // 8 % 2 * 2 + j // 8 % 2
    numbers = np.choose(word, philox(seed, counters)) >> 8 * byte & 0xFF
    return torch.from_numpy(numbers >= round(probability * 256))


class PhiloxDropout:
    """Takes the sequences in turn, as the references do, which pass over those without a pair."""

    def __init__(self, probability: float, seed: int | Tensor | None, device: torch.device):
        self.probability, self.seed, self.sequence = probability, int(seed or 0), -1

    def __call__(self, weights: Tensor) -> Tensor:
        self.sequence += 1
        if not self.probability:
            return weights
        keep = kept_weights(self.seed, self.sequence, *weights.shape, self.probability)
        return weights * keep.to(weights) / (1 - self.probability)
