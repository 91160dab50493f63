"""Number of encoder frames of an utterance."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

SAMPLE_RATE = 16_000
"""Samples per second of every waveform the model sees."""

_SHORT_SAMPLES = 10_240
"""Samples of a very short utterance, 0.64 s."""

Count = TypeVar("Count", int, np.ndarray)


@dataclass(frozen=True, kw_only=True, slots=True)
class Framing:
    """Maps samples to encoder frames; the default is a FastConformer that subsamples by 8."""

    hop: int = 160  # Samples between two mel rows
    subsampling: int = 8  # Mel rows per encoder frame
    # Least number of encoder frames of an utterance: a shorter one is extended with silence, unless
    # it has no samples
    minimum: int = 0
    # Whether the convolutions that subsample read no later rows. Frame f then reads the mel rows up
    # to s f, instead of s f + s - 1, and there is one frame more
    causal: bool = False
    # Samples after its own hop that a frame reads, too: without them there is no frame
    margin: int = 0

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
        return max(8, -(-frames // max(_SHORT_SAMPLES // self.samples, self.minimum, 1)))

    def capacity(self, frames: int, sequences: int) -> int:
        """Return a number of samples that these frames of so many utterances never exceed."""
        # An utterance of n frames has fewer samples than n + 1 frames stand for, and the margin.
        return (frames + sequences) * self.samples + sequences * self.margin

    def samples_of(self, frames: int) -> int:
        """Samples of an utterance of so many frames; one of several numbers."""
        if self.causal and frames:
            return max((frames - 1) * self.samples, self.hop)
        return frames * self.samples + self.margin * (frames > 0)

    def frames(self, samples: Count) -> Count:
        """Encoder frames of utterances of so many samples at `SAMPLE_RATE`."""
        rows = (samples - self.margin) // self.hop
        if self.causal:
            frames = rows
            for _ in range(self.subsampling.bit_length() - 1):
                frames = frames // 2 + 1
            frames = frames * (rows > 0)
        else:
            frames = -(-rows // self.subsampling)
        least = self.minimum * (samples > 0)
        return np.maximum(frames, least) if isinstance(frames, np.ndarray) else max(frames, least)


FASTCONFORMER = Framing()
"""A frame for each 80 ms: that of a FastConformer, unless it subsamples by 4."""
