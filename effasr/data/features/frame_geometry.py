"""Number of encoder frames of an utterance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

SAMPLE_RATE = 16_000
"""Samples per second of every waveform the model sees."""

_SHORT_ROWS = 64
"""Mel rows of a very short utterance, 0.64 s."""

Count = TypeVar("Count", int, np.ndarray)


@dataclass(frozen=True, kw_only=True, slots=True)
class Framing:
    """Maps samples to encoder frames; the default is a FastConformer that subsamples by 8.

    Attributes:
        hop: Samples between two mel rows.
        subsampling: Mel rows per encoder frame.
        minimum: Least number of encoder frames of an utterance: a shorter one is extended with
            silence, unless it has no samples.
    """

    hop: int = 160
    subsampling: int = 8
    minimum: int = 0

    @property
    def samples(self) -> int:
        """Samples that an encoder frame stands for: 1280, or 80 ms, by default."""
        return self.hop * self.subsampling

    @property
    def seconds(self) -> float:
        """Seconds that an encoder frame stands for."""
        return self.samples / SAMPLE_RATE

    def sequences(self, frames: int) -> int:
        """Return the utterances that fit into a batch of ``frames``, unless they are very short."""
        return max(8, -(-frames // max(_SHORT_ROWS // self.subsampling, self.minimum)))

    def frames(self, samples: Count) -> Count:
        """Encoder frames of utterances of so many samples at `SAMPLE_RATE`."""
        frames = -(-(samples // self.hop) // self.subsampling)
        least = self.minimum * (samples > 0)
        return np.maximum(frames, least) if isinstance(frames, np.ndarray) else max(frames, least)


FASTCONFORMER = Framing()
"""A frame for each 80 ms: that of a FastConformer, unless it subsamples by 4."""
