"""Millions of short arrays in two long ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

_BLOCK = 2**16
"""Arrays that are looked at together."""


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Arrays of unequal length, end to end."""

    values: np.ndarray
    offsets: np.ndarray

    def __getitem__(self, index: int) -> np.ndarray:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """int64 (n,), of each array."""
        return np.diff(self.offsets)

    def blocks(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """The values of the arrays at these indices, end to end, a part at a time."""
        for first in range(0, len(rows), _BLOCK):
            some = rows[first : first + _BLOCK]
            begin, end = self.offsets[some], self.offsets[some + 1]
            if (begin[1:] == end[:-1]).all():
                yield self.values[begin[0] : end[-1]]
            else:
                lengths = end - begin
                shift = np.repeat(begin - (np.cumsum(lengths) - lengths), lengths)
                yield self.values[shift + np.arange(len(shift))]


def ragged(values: np.ndarray, lengths: Iterable[int] | np.ndarray) -> Ragged:
    """Arrays of these lengths, which lie end to end in ``values``."""
    return Ragged(values, np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]))
