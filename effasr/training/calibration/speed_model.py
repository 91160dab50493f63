"""The time of a micro-batch: a fixed part, and a part per frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """``seconds = fixed + per_frame * frames``, neither of them negative."""

    fixed: float
    per_frame: float

    @classmethod
    def fit(cls, frames: Sequence[int], seconds: Sequence[float]) -> SpeedModel:
        """Fit the model to the seconds of micro-batches by least squares of relative errors."""
        if not frames:
            raise ValueError("`frames` must hold at least one trial, but is empty.")
        x, y = np.array(frames, dtype=np.float64), np.array(seconds)
        alone = float((x / y).sum() / np.square(x / y).sum())
        if len(set(frames)) < 2:
            return cls(0.0, alone)
        matrix = np.stack([1 / y, x / y], axis=1)
        fixed, per_frame = np.linalg.lstsq(matrix, np.ones(len(x)), rcond=None)[0].tolist()
        if fixed < 0:
            return cls(0.0, alone)
        if per_frame < 0:
            return cls(float((1 / y).sum() / np.square(1 / y).sum()), 0.0)
        return cls(fixed, per_frame)

    def predict(self, frames: int) -> float:
        """Return the seconds of a micro-batch."""
        return self.fixed + self.per_frame * frames
