"""Speed perturbation: each utterance is trained on at several speeds, as separate copies.

Speech at 0.9 times its speed is longer and lower, as sox and lhotse make it.
"""

from __future__ import annotations

import numpy as np
from lhotse.cut import Cut

from effasr.data.audio.waveform import AudioSegment, load_audio, samples_in
from effasr.data.features.frame_geometry import SAMPLE_RATE


def name_at(name: str, speed: float) -> str:
    """Return the name of an utterance at a speed; lhotse gives it the same."""
    return name if speed == 1 else f"{name}_sp{speed}"


def load_at(source: Cut | AudioSegment, speed: float) -> np.ndarray:
    """Return the waveform at a speed: read at another sample rate, and played at the usual one.

    Returns:
        float32 (samples,), exactly ``samples_in(duration_at(source.duration, speed))``.
    """
    return load_audio(source, SAMPLE_RATE / speed)


def duration_at(duration: float, speed: float) -> float:
    """Return an utterance's seconds at a speed; for speeds other than 1, of whole samples."""
    return duration if speed == 1 else samples_in(duration, SAMPLE_RATE / speed) / SAMPLE_RATE
