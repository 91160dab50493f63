"""Loudness of the last seconds of a stream, by the frames of an encoder."""

from __future__ import annotations

import numpy as np

from effasr.transcription.inputs.vad import HOP_SECONDS, loudness

_SILENCE_DB = -100.0  # level of zeros in `loudness`


class StreamLoudness:
    """Levels of the frames that are still of interest, one for each `HOP_SECONDS`."""

    def __init__(self, sample_rate: int, frame_seconds: float):
        self.first = self.frames = 0
        self._rate, self._hops = sample_rate, frame_seconds / HOP_SECONDS
        self._levels = np.zeros(0)

    @property
    def levels(self) -> np.ndarray:
        """Levels from the first frame on, in dB as `loudness` gives them: float (hops,)."""
        return self._levels

    def add(self, samples: np.ndarray, frames: int) -> None:
        """Add the samples of the next frames: float (samples,), fewer at the end of a stream."""
        # Levels count from the beginning of the stream, so that rounding does not add up.
        count = self._hop(self.frames + frames) - self._hop(self.frames)
        found = loudness(samples, self._rate)[:count]
        silence = np.full(count - len(found), _SILENCE_DB)
        self._levels = np.concatenate([self._levels, found, silence])
        self.frames += frames

    def forget(self, before: int) -> None:
        if before > self.first:
            self._levels = self._levels[self._hop(before) - self._hop(self.first) :].copy()
            self.first = before

    def _hop(self, frame: int) -> int:
        return round(frame * self._hops)
