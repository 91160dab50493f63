"""Silence at the ends of training utterances: a model that hears none in training knows none."""

from dataclasses import dataclass

import numpy as np

from effasr.checks import check
from effasr.data.audio.loudness import loudness
from effasr.data.features.frame_geometry import SAMPLE_RATE

_MOST_SECONDS = 30.0
_SEED = 0x51
_ZEROS = 0.25  # share of silence without any noise, as in recordings that were gated or joined
_BELOW_DB = 30.0, 70.0  # noise under the loudest 50 ms, as in rooms that are loud or quiet
_MOST_TILT = 2.0  # power falls by up to this power of the frequency, as in rooms


@dataclass(frozen=True, kw_only=True, slots=True)
class SilencePaddingConfig:
    """Silence at the ends of training utterances.

    Attributes:
        seconds: Silence of an utterance, at both ends together: a number, or the least and the
            greatest of those that are drawn uniformly. An utterance has as much in every epoch, so
            that plans count it; its sound (low noise, or none) and its place differ. It is less
            where an utterance would exceed ``max_duration``, the budget or the model.
        probability: The share of utterances that get silence.
    """

    seconds: float | tuple[float, float] = (0.2, 1.5)
    probability: float = 0.5

    def __post_init__(self) -> None:
        low, high = self.range
        if not 0 <= low <= high <= _MOST_SECONDS or not high:
            value = list(self.seconds) if isinstance(self.seconds, tuple) else self.seconds
            raise ValueError(
                "`seconds` must be a number greater than 0, or the least and the greatest one, up "
                f"to {_MOST_SECONDS:g}, but is {value}: [0.2, 1.5] is usual."
            )
        rule = "be greater than 0 and at most 1"
        remedy = "leave `silence_padding` null to train without"
        check(0 < self.probability <= 1, "probability", rule, f"{self.probability:g}", remedy)

    @property
    def range(self) -> tuple[float, float]:
        return self.seconds if isinstance(self.seconds, tuple) else (self.seconds, self.seconds)

    def __str__(self) -> str:
        low, high = self.range
        seconds = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        return f"{100 * self.probability:g} % with {seconds} s of silence at the ends"


def draw_silence(config: SilencePaddingConfig, room: np.ndarray) -> np.ndarray:
    """Return how many samples of silence utterances get: int32 (n,), at most ``room``, (n,)."""
    generator = np.random.default_rng(_SEED)
    is_padded = generator.random(len(room)) < config.probability
    samples = generator.uniform(*config.range, len(room)) * SAMPLE_RATE
    return np.where(is_padded, np.clip(samples, 0, np.maximum(room, 0)), 0).astype(np.int32)


def with_silence(
    audio: np.ndarray, samples: int, generator: np.random.Generator
) -> tuple[np.ndarray, int]:
    """Return audio, float32 (n,), with so many samples of silence at its ends, and those before."""
    before = int(generator.integers(samples + 1))
    silence = np.zeros(samples, np.float32)
    if generator.random() >= _ZEROS and len(audio):
        below, tilt = generator.uniform(*_BELOW_DB), generator.uniform(0, _MOST_TILT)
        spectrum = np.fft.rfft(generator.standard_normal(samples))
        spectrum *= np.maximum(np.arange(len(spectrum)), 1) ** (-tilt / 2)
        noise = np.fft.irfft(spectrum, samples)
        power = 10 ** ((float(loudness(audio, SAMPLE_RATE).max()) - below) / 10)
        silence = (noise * np.sqrt(power / max(np.mean(noise**2), 1e-30))).astype(np.float32)
    return np.concatenate([silence[:before], audio, silence[before:]]), before
