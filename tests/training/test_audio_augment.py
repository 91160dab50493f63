"""Runs on audio that is changed in every epoch."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

from effasr import config as configuration
from effasr.data.audio.augmentation.config import (
    AudioAugmentationConfig,
    NoiseConfig,
    ReverberationConfig,
    TelephoneConfig,
)
from effasr.training.checkpointing.run_checkpoints import RunCheckpoints
from effasr.training.config import TrainConfig
from effasr.training.trainer import run


@pytest.fixture
def make_augmented(make_config, tmp_path):
    """A run at two speeds, in noise, in rooms and over the telephone."""
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


def _written(config: TrainConfig) -> Path:
    path = Path(config.output) / "written.yaml"
    path.write_text(configuration.dump(config))
    return path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = RunCheckpoints(folder / "checkpoints", 3).newest()
    assert found is not None
    return load_file(found[0] / "model.safetensors")


@pytest.mark.extended
def test_an_interrupted_run_ends_as_one_that_was_left_alone(make_augmented, tmp_path) -> None:
    assert run(make_augmented("straight")) == 0
    stopped = make_augmented("stopped")
    assert run(configuration.load(TrainConfig, _written(stopped), ["training.stop_at=2"])) == 0
    (tmp_path / "noise").rename(tmp_path / "moved")
    here = [f"data.audio_augmentation.noise.manifests=[{tmp_path}/moved]", "data.workers=0"]
    assert run(configuration.load(TrainConfig, _written(stopped), here)) == 0
    ours, theirs = weights(tmp_path / "straight"), weights(tmp_path / "stopped")
    assert len(ours) > 20
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    for change, message in (
        (
            "data.audio_augmentation.noise.snr=[1, 2]",
            r"`data\.audio_augmentation\.noise\.snr` must stay \[5\.0, 20\.0\]",
        ),
        (
            "data.audio_augmentation.telephone=null",
            r"`data\.audio_augmentation\.telephone` must stay \{'probability'",
        ),
        ("data.speed_perturbation=[1.0]", r"`data\.speed_perturbation` must stay \[1\.0, 1\.1\]"),
    ):
        more = [*here, "training.max_steps=7", change]
        other = configuration.load(TrainConfig, _written(stopped), more)
        with pytest.raises(ValueError, match=message):
            run(other)
