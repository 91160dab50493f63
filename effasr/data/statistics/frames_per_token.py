"""Encoder frames per token, which decide whether CTC can learn an alignment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from effasr.data.features.frame_geometry import SAMPLE_RATE, Framing

LEAST_MEDIAN = 2.5
"""Median frames per token from which on CTC learns well; with fewer there is hardly a frame for the
blank between two tokens, and small models stay at the plateau of blanks alone."""

MOST_UNDER_TWO = 0.2
"""Largest share of utterances with under two frames per token."""

MOST_IMPOSSIBLE = 0.02
"""Largest share of utterances that CTC cannot align at all."""


@dataclass(frozen=True, slots=True)
class FramesPerToken:
    """The distribution over the utterances of a corpus.

    Attributes:
        median: Encoder frames for each token of the text.
        under_two: Share of utterances with under two.
        impossible: Share of utterances with too few frames for any CTC alignment.
        utterances: On which this is based.
    """

    median: float
    under_two: float
    impossible: float
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

        Args:
            frames: int (n,), encoder frames of each utterance.
            tokens: int (n,), tokens of its text, at least 1.
            needed: int (n,), the least frames that CTC needs for it; by default ``tokens``, which
                leaves out the blanks between equal tokens.
            excluded: Utterances besides, which were left out because CTC cannot align them.

        Raises:
            ValueError: There is no utterance.
        """
        count = len(frames) + excluded
        if not count:
            raise ValueError("`frames` must have at least one utterance, but is empty.")
        # Those left out count as under one frame per token.
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
        """Whether CTC will learn late or not at all, at least from little speech."""
        return (
            self.median < LEAST_MEDIAN
            or self.under_two > MOST_UNDER_TWO
            or self.impossible > MOST_IMPOSSIBLE
        )


def frames_in(seconds: np.ndarray, framing: Framing) -> np.ndarray:
    """Encoder frames of utterances of these durations: float (n,) to int64 (n,)."""
    return framing.frames(np.floor(seconds * SAMPLE_RATE + 0.5).astype(np.int64))
