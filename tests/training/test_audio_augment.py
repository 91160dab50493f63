"""Runs on audio that is changed in every epoch."""

import numpy as np
import pytest
import soundfile

from effasr import config as configuration
from effasr.data.audio.augmentation.config import (
    AudioAugmentationConfig,
    NoiseConfig,
    ReverberationConfig,
    TelephoneConfig,
)
from effasr.training.config import TrainConfig
from effasr.training.trainer import run
from tests.training.test_exactness import assert_same_end


@pytest.fixture
def make_augmented(make_config, tmp_path):
    noise = tmp_path / "noise"
    noise.mkdir()
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        soundfile.write(noise / f"{name}.wav", 0.1 * rng.standard_normal(9000), 16_000)
    augment = AudioAugmentationConfig(
        noise=NoiseConfig(manifests=str(noise)),
        reverberation=ReverberationConfig(simulated=True),
        telephone=TelephoneConfig(),
    )

    def make(name: str) -> TrainConfig:
        return make_config(
            name=name,
            data={"speed_perturbation": (1.0, 1.1), "audio_augmentation": augment, "workers": 1},
            training={"max_steps": 6},
        )

    return make


@pytest.mark.extended
def test_an_interrupted_run_ends_as_one_that_was_left_alone(make_augmented, tmp_path):
    """Also where the noise has moved; what changes the audio must stay."""
    stopped, recipe = make_augmented("stopped"), tmp_path / "recipe.yaml"
    recipe.write_text(configuration.dump(stopped))

    def go(*overrides: str) -> int:
        return run(configuration.load(TrainConfig, recipe, overrides))

    assert run(make_augmented("straight")) == 0
    assert go("training.stop_at=2") == 0
    (tmp_path / "noise").rename(tmp_path / "moved")
    moved = f"data.audio_augmentation.noise.manifests=[{tmp_path}/moved]", "data.workers=0"
    assert go(*moved) == 0
    assert_same_end(tmp_path / "stopped", tmp_path / "straight", 6)
    for field, value, before in (
        ("data.audio_augmentation.noise.snr", "[1, 2]", r"\[5\.0, 20\.0\]"),
        ("data.audio_augmentation.telephone", "null", r"\{'probability'"),
        ("data.speed_perturbation", "[1.0]", r"\[1\.0, 1\.1\]"),
    ):
        with pytest.raises(ValueError, match=rf"`{field}` must stay {before}"):
            go(*moved, "training.max_steps=7", f"{field}={value}")
