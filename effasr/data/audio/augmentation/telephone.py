"""Simulates a telephone channel: 8 kHz and mu-law."""

from __future__ import annotations

import math

import numpy as np
import soxr

from effasr.data.features.frame_geometry import SAMPLE_RATE

_TELEPHONE_RATE = 8000
_MU = 255.0


def telephone(audio: np.ndarray) -> np.ndarray:
    """Return audio after 8 kHz and 8 bits of mu-law.

    Args:
        audio: float32 (samples,); full scale is 1.

    Returns:
        float32 (samples,), at the same rate and time, without anything above 4 kHz. What is
        beyond full scale is clipped, as a telephone does.

    References:
        ITU-T G.711; here the continuous curve, of which the standard has a piecewise linear one.
    """
    narrow = soxr.resample(audio, SAMPLE_RATE, _TELEPHONE_RATE)
    wide = soxr.resample(_expanded(_compressed(narrow)), _TELEPHONE_RATE, SAMPLE_RATE)
    # Resampling to and fro may miss the length by a sample.
    return np.pad(wide, (0, max(0, len(audio) - len(wide))))[: len(audio)]


def _compressed(values: np.ndarray) -> np.ndarray:
    """Return codes from -127 to 127."""
    scale = np.float32(127 / math.log1p(_MU))
    codes = np.rint(np.log1p(np.float32(_MU) * np.minimum(np.abs(values), 1)) * scale)
    return np.copysign(codes, values)


def _expanded(codes: np.ndarray) -> np.ndarray:
    scale = np.float32(math.log1p(_MU) / 127)
    return np.copysign(np.expm1(np.abs(codes) * scale) / np.float32(_MU), codes)
