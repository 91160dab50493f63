"""The memory of a micro-batch: a model with four coefficients, fitted to trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import product

import numpy as np


@dataclass(frozen=True, slots=True)
class Load:
    """Quantities that determine the memory of a micro-batch."""

    frames: int  # Encoder rows, padding included
    tokens: int  # Decoder rows, padding included
    cells: int  # Scores of all attentions and lattices; see `workload.cells`


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """``peak = fixed + per_frame * frames + per_token * tokens + per_cell * cells``, in bytes.

    No coefficient is negative. ``per_cell`` is 0 where no operation materialises its scores, as
    with fused kernels; ``fixed`` is the memory of weights, moments, libraries and the process.
    """

    fixed: float
    per_frame: float
    per_token: float
    per_cell: float

    @classmethod
    def fit(cls, loads: Sequence[Load], peaks: Sequence[int]) -> MemoryModel:
        """Fit the model to the peaks (bytes) of trials by non-negative least squares."""
        if not loads:
            raise ValueError("`loads` must hold at least one trial, but is empty.")
        matrix = np.array([(1, *astuple(load)) for load in loads], dtype=np.float64)
        scale = np.maximum(matrix.max(axis=0), 1.0)
        values = np.array(peaks, dtype=np.float64)
        best: tuple[float, np.ndarray] | None = None
        # Four coefficients have sixteen subsets: the exact solution is that of one of them.
        for used in product((True, False), repeat=4):
            columns = np.flatnonzero(used)
            found = np.zeros(4)
            if columns.size:
                scaled = matrix[:, columns] / scale[columns]
                found[columns] = np.linalg.lstsq(scaled, values, rcond=1e-9)[0]
            if (found < 0).any():
                continue
            residual = float(np.square(matrix / scale @ found - values).sum())
            # On a tie prefer fewer coefficients: the others are not determined by the trials.
            if best is None or residual <= best[0] * (1 + 1e-9):
                best = residual, found / scale
        assert best is not None
        return cls(*best[1].tolist())

    def predict(self, load: Load) -> int:
        """Return the peak in bytes."""
        return round(
            self.fixed
            + self.per_frame * load.frames
            + self.per_token * load.tokens
            + self.per_cell * load.cells
        )

    def batch_size(self, one: Load, limit: float) -> int:
        """Return how many utterances of this load each stay within ``limit`` bytes; at least 0."""
        each = self.predict(one) - self.predict(Load(0, 0, 0))
        return max(0, int((limit - self.fixed) // max(each, 1)))


# The time of a micro-batch: a fixed part, and a part per frame.


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


# Frame budgets whose matrix products fill every multiprocessor of a GPU.
#
# A product computes its result in tiles, one on a multiprocessor at a time. Where the number of
# tiles is no multiple of the number of multiprocessors, some wait for the last tiles: 6,000 frames
# of 1,024 channels are 188 tiles, which take 132 multiprocessors as long as 264.

_TILE_ROWS, _TILE_COLUMNS = 128, 256
"""The usual tile of a 16-bit product of cuBLAS on Hopper."""


def whole_waves(width: int, multiprocessors: int) -> int:
    """Return the least number of frames whose products fill all multiprocessors evenly.

    Its multiples do, too, and so do products to a multiple of the width, such as those of feed
    forward layers.
    """
    for name, value in (("width", width), ("multiprocessors", multiprocessors)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, but is {value}.")
    columns = math.ceil(width / _TILE_COLUMNS)
    return _TILE_ROWS * (multiprocessors // math.gcd(multiprocessors, columns))
