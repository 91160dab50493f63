"""Samples of a stream that are still needed."""

from __future__ import annotations

import numpy as np

_SHORT_SAMPLES = 1 << 16


class HeldSamples:
    """Samples of a stream, which are numbered from its beginning."""

    def __init__(self) -> None:
        self.begin = self.end = 0
        self._parts: list[np.ndarray] = []

    def append(self, samples: np.ndarray) -> None:
        if len(samples):
            self._parts.append(samples.astype(np.float32))
            self.end += len(samples)

    def between(self, first: int, last: int) -> np.ndarray:
        """Return the samples from one to before another, float32, or to the end if it is sooner."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0][first - self.begin : last - self.begin]

    def forget(self, before: int) -> None:
        if self._parts:
            rest = self.between(before, self.end)
            # A view keeps its whole array alive, but a long rest is not copied for each chunk.
            whole = rest if rest.base is None else rest.base
            is_short = rest.size <= max(whole.size // 2, _SHORT_SAMPLES)
            self._parts = [rest.copy() if is_short else rest]
        self.begin = before

    def clear(self) -> None:
        self._parts, self.begin = [], self.end
