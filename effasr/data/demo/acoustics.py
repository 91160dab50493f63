"""Makes synthetic speech sound recorded: level, background noise, 16 bits."""

from __future__ import annotations

import numpy as np
import soxr

SAMPLE_RATE = 16_000
REFERENCE_LEVEL_DB = -24.0
"""Mean power of the speech at a gain of 0 dB, relative to full scale."""
_CEILING = 0.95


def record(
    speech: np.ndarray,
    speech_rate: int,
    *,
    gain_db: float,
    snr_db: float,
    noise_slope: float,
    lead_s: float,
    tail_s: float,
    seed: int,
) -> np.ndarray:
    """Resamples, sets the level, adds noise, and quantises without clipping.

    Args:
        speech: float32 (samples,) in [-1, 1].
        speech_rate: Sample rate of the speech in Hz.
        gain_db: Level relative to `REFERENCE_LEVEL_DB`.
        snr_db: Power of the speech over that of the noise.
        noise_slope: Noise power falls as 1 / f^slope.
        lead_s: Seconds of noise alone before the speech.
        tail_s: Seconds of noise alone after it.
        seed: Seed of the noise.

    Returns:
        int16 (samples',) at 16 kHz; where the peak would pass 95 % of full scale, all of it is
        scaled down.
    """
    resampled = soxr.resample(speech, speech_rate, SAMPLE_RATE)
    level = 10 ** ((REFERENCE_LEVEL_DB + gain_db) / 20)
    resampled = resampled * (level / np.sqrt(np.mean(resampled**2)))
    margins = (round(lead_s * SAMPLE_RATE), round(tail_s * SAMPLE_RATE))
    mixed = np.pad(resampled, margins)
    mixed += coloured_noise(len(mixed), noise_slope, seed) * (level * 10 ** (-snr_db / 20))
    mixed *= min(1.0, _CEILING / np.abs(mixed).max())
    return np.round(mixed * 32767).astype(np.int16)


def coloured_noise(samples: int, slope: float, seed: int) -> np.ndarray:
    """Gaussian noise of unit power whose spectrum falls as 1 / f^slope above 50 Hz.

    Returns:
        float32 (samples,).
    """
    rng = np.random.default_rng(seed)
    # A power of two keeps the transform fast at any length; the surplus is cut off.
    length = 1 << max(samples - 1, 1).bit_length()
    bins = length // 2 + 1
    spectrum = rng.standard_normal(2 * bins, dtype=np.float32).view(np.complex64)
    frequency = np.linspace(0, SAMPLE_RATE / 2, bins, dtype=np.float32)
    spectrum *= np.maximum(frequency, 50.0) ** (-slope / 2)
    spectrum[0] = 0
    noise = np.fft.irfft(spectrum, length)[:samples].astype(np.float32)
    return noise / np.sqrt(np.mean(noise**2))
