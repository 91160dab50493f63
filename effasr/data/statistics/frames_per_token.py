"""Encoder frames per token, which decide whether CTC can learn an alignment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from effasr.data.features.frame_geometry import SAMPLE_RATE, Framing

LEAST_MEDIAN = 2.5
"""Least median of frames per token with which CTC learns well. With fewer there is hardly a frame
for the blank between two tokens, and small models keep emitting only blanks."""

MOST_UNDER_TWO = 0.2
"""Largest acceptable share of utterances with fewer than two frames per token."""

MOST_IMPOSSIBLE = 0.02
"""Largest acceptable share of utterances that CTC cannot align at all."""


@dataclass(frozen=True, slots=True)
class FramesPerToken:
    """The distribution of frames per token over the utterances of a corpus."""

    median: float  # encoder frames per token
    under_two: float  # share of utterances with fewer than two frames per token
    impossible: float  # share of utterances with too few frames for any CTC alignment
    utterances: int

    @classmethod
    def of(
        cls,
        frames: np.ndarray,
        tokens: np.ndarray,
        needed: np.ndarray | None = None,
        *,
        excluded: int = 0,
    ) -> FramesPerToken:
        """Compute the distribution.

        ``needed`` is the least number of frames that CTC needs for each text; by default
        ``tokens``, which ignores the blanks between equal tokens. ``excluded`` is the number of
        further utterances, which were left out because CTC cannot align them.
        """
        count = len(frames) + excluded
        if not count:
            raise ValueError("`frames` must have at least one utterance, but is empty.")
        # Excluded utterances count as having less than one frame per token.
        ratios = np.concatenate([np.zeros(excluded), frames / tokens])
        lacking = int((frames < (tokens if needed is None else needed)).sum())
        return cls(
            median=float(np.median(ratios)),
            under_two=float((ratios < 2).mean()),
            impossible=(lacking + excluded) / count,
            utterances=count,
        )

    @property
    def is_hard(self) -> bool:
        """Whether CTC will learn late or not at all, at least from a small corpus."""
        return (
            self.median < LEAST_MEDIAN
            or self.under_two > MOST_UNDER_TWO
            or self.impossible > MOST_IMPOSSIBLE
        )


def frames_in(seconds: np.ndarray, framing: Framing) -> np.ndarray:
    """Return the encoder frames of utterances of these durations: float (n,) to int64 (n,)."""
    return framing.frames(np.floor(seconds * SAMPLE_RATE + 0.5).astype(np.int64))
