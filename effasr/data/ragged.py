"""Millions of short arrays in two long ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Arrays of unequal length, end to end."""

    values: np.ndarray
    offsets: np.ndarray

    def __getitem__(self, index: int) -> np.ndarray:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def select(self, kept: np.ndarray) -> Ragged:
        """Those at the ascending indices ``kept``."""
        if len(kept) == len(self.offsets) - 1:
            return self
        lengths = np.diff(self.offsets)
        mask = np.zeros(len(lengths), dtype=bool)
        mask[kept] = True
        return ragged(self.values[np.repeat(mask, lengths)], lengths[kept])


def ragged(values: np.ndarray, lengths: Iterable[int] | np.ndarray) -> Ragged:
    """Arrays of these lengths, which lie end to end in ``values``."""
    return Ragged(values, np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]))
