"""The memory of a micro-batch: a model with four coefficients, fitted to trials."""

from __future__ import annotations

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
