"""Random permutations that do not depend on the machine or the version of numpy."""

from __future__ import annotations

import numpy as np


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of ``0 .. count - 1`` that depends on the arguments alone, int64.

    Every index is hashed together with seed and epoch, and the hashes are sorted.
    """
    return np.argsort(hashes(count, seed, epoch), kind="stable")


def hashes(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return uniform random numbers for ``0 .. count - 1`` by the arguments alone, uint64.

    The hash is SplitMix64's: Steele et al., 2014, https://doi.org/10.1145/2714064.2660195.
    """
    key = _mix(_mix(np.array([seed % 2**64], np.uint64)) + np.uint64(epoch))
    values = np.arange(count, dtype=np.uint64)
    values *= np.uint64(0x9E3779B97F4A7C15)
    values += key
    return _mix(values)


def _mix(values: np.ndarray) -> np.ndarray:
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
