import numpy as np
import pytest

from effasr.transcription.inputs.vad import LoudnessDetector
from tests.support.recognition import model, noise, saved, tdt_model, tokenizer
from tests.support.streaming_model import streaming_model

__all__ = ["model", "noise", "saved", "streaming_model", "tdt_model", "tokenizer"]


@pytest.fixture
def all_is_speech(monkeypatch):
    """``all_is_speech()``: from now on, no end of a recording is trimmed."""

    def detect(detector: LoudnessDetector, samples: np.ndarray) -> np.ndarray:
        return np.ones(-(-len(samples) // 160), dtype=bool)

    return lambda: monkeypatch.setattr(LoudnessDetector, "__call__", detect)
