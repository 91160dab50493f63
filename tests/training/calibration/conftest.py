from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from effasr.data.sampling.plan import UtteranceLengths
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.training.calibration.calibrate import LinearModel
from effasr.training.calibration.trial import Measurement
from effasr.training.calibration.workload import Population, Workload

MODEL = ModelConfig(
    encoder=FastConformerConfig(
        width=16, layers=2, heads=2, feed_forward=16, subsampling_channels=4
    ),
    decoder=DecoderConfig(width=16, layers=1, heads=2, feed_forward=16),
    ctc=True,
)


def lengths(count: int = 2000, *, longest: int = 200, seed: int = 0) -> UtteranceLengths:
    generator = np.random.default_rng(seed)
    frames = generator.gamma(4.0, 15.0, count).clip(8, longest).astype(np.int32)
    frames[0] = longest
    tokens = (frames * generator.normal(0.3, 0.03, count)).clip(3).astype(np.int32)
    return UtteranceLengths(frames, tokens)


@pytest.fixture(scope="session")
def population() -> Population:
    return Population.of(lengths())


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "effasr" / "calibration"


@pytest.fixture
def machine() -> Callable[..., Callable[[Workload], Measurement]]:
    def make(
        memory: LinearModel, speed: LinearModel, holds: float, noise: float = 0.0
    ) -> Callable[[Workload], Measurement]:
        generator = np.random.default_rng(1)

        def measure(work: Workload) -> Measurement:
            peak = round(memory.predict(work.shape.frame_budget))
            if peak > holds:
                return Measurement(fits=False, reason="out of memory")
            audio = 0.08 * sum(f for lengths in work.timed for f, _ in lengths) / len(work.timed)
            seconds = speed.predict(work.shape.frame_budget) * (1 + noise * generator.random())
            return Measurement(True, peak, seconds, audio)

        return measure

    return make
