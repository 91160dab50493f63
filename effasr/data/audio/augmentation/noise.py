"""Adds noise at a signal-to-noise ratio."""

from __future__ import annotations

import math

import numpy as np

from effasr.data.features.frame_geometry import SAMPLE_RATE

_FADE = SAMPLE_RATE // 50
"""Samples over which a clip that begins anew is mixed with its end: 20 ms, so nothing clicks."""


def add_noise(speech: np.ndarray, noise: np.ndarray, snr: float) -> np.ndarray:
    """Add noise at a signal-to-noise ratio.

    Args:
        speech: float32 (samples,).
        noise: float32 (samples,), as many.
        snr: Ratio of the mean powers of both, in dB.

    Returns:
        float32 (samples,), with the speech as loud as it was; the speech alone where either is
        silent, so that there is no ratio.
    """
    power, noise_power = mean_power(speech), mean_power(noise)
    if power == 0 or noise_power == 0:
        return speech
    gain = math.sqrt(power / noise_power) * 10 ** (-snr / 20)
    return speech + np.float32(gain) * noise


def looped(clip: np.ndarray, samples: int, start: int) -> np.ndarray:
    """Return a stretch of a clip that is repeated without end.

    Where it begins anew, its end is faded out under its beginning, at equal power.

    Args:
        clip: float32 (n,), with at least one sample.
        samples: Samples of the stretch.
        start: Start in the clip.

    Returns:
        float32 (samples,).
    """
    if start + samples <= len(clip):
        return clip[start : start + samples]
    fade = min(_FADE, len(clip) // 2)
    angles = (np.arange(fade, dtype=np.float32) + 0.5) * np.float32(math.pi / 2 / max(1, fade))
    period = clip[: len(clip) - fade].copy()
    period[:fade] = np.sin(angles) * clip[:fade] + np.cos(angles) * clip[len(clip) - fade :]
    repeats = -(-(start % len(period) + samples) // len(period))
    begin = start % len(period)
    return np.tile(period, repeats)[begin : begin + samples]


def mean_power(samples: np.ndarray) -> float:
    """Mean square of samples, summed in float64; 0 of none."""
    if not len(samples):
        return 0.0
    # einsum and not dot: BLAS may sum in another order with another number of threads.
    return float(np.einsum("i,i->", samples, samples, dtype=np.float64)) / len(samples)
