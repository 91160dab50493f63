"""Runs that were killed, and runs on several ranks, against one that was left alone."""

import multiprocessing
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from effasr import config as configuration
from effasr.checkpoint import load_model
from effasr.data.audio.augmentation.config import (
    AudioAugmentationConfig,
    NoiseConfig,
    ReverberationConfig,
    TelephoneConfig,
)
from effasr.data.audio.silence import SilencePaddingConfig
from effasr.distributed import tensor_files
from effasr.model.transducer import TransducerConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.schedules import ScheduleConfig
from effasr.training.config import DiagnosticsConfig, TeacherConfig, TrainConfig
from effasr.training.loss import LossConfig
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run
from tests.support.run_ranks import recipe_of, started, train_on_ranks
from tests.support.sources import SOURCES, make_source
from tests.training.conftest import TEXT_ENCODER, at_step
from tests.training.test_faults import wait_for

MEASURED = {
    "data_wait_s", "step_s", "useful_tflops", "peak_memory_bytes", "slowest_rank", "rank_wait_s",
    "seconds", "rtfx",
}  # fmt: skip
STEPS = 20
LONG = {"max_steps": STEPS, "checkpoint_every": 5, "keep": 10}


def metrics(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    lines = read_lines(folder / name)
    return [{name: line[name] for name in line.keys() - MEASURED} for line in lines]


def tensors(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint: weights, statistics, moments, averages."""
    path = folder / "checkpoints" / f"step_{steps:08d}"
    result = {f"model.{name}": t for name, t in load_model(path).model.state_dict().items()}

    def walk(value: object, name: str):
        if isinstance(value, torch.Tensor):
            result[name] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{name}.{key}")

    walk(torch.load(path / "training.pt", weights_only=True), "state")
    walk(tensor_files.read_whole(path / "training"), "state")
    return result


def assert_same_end(first: Path, second: Path, steps: int = STEPS):
    ours, theirs = tensors(first, steps), tensors(second, steps)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 50
    for name, tensor in ours.items():
        torch.testing.assert_close(
            theirs[name], tensor, rtol=0, atol=0, equal_nan=True, msg=lambda _, name=name: name
        )
    assert metrics(first) == metrics(second)
    assert metrics(first)[-1]["step"] == steps
    for name in ("validation.jsonl", "warnings.jsonl"):
        assert metrics(first, name) == metrics(second, name)
    blends = [folder / "blend.json" for folder in (first, second)]
    assert blends[0].exists() == blends[1].exists()
    assert not blends[0].exists() or blends[0].read_text() == blends[1].read_text()


def kill_worker():
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.representative(source="parquet")
def test_a_killed_run_ends_as_if_nothing_had_happened(
    source, make_config, tones, tmp_path, monkeypatch
):
    """First a process that loads is killed, then the run itself; that left alone reads files."""
    make = partial(make_config, training=LONG)
    assert run(make(name="straight", data=SILENCE)) == 0
    path = make_source(source, tones / "train.jsonl", tmp_path / "source")
    config = make(name="killed", data=SILENCE | {"train": str(path), "workers": 1})
    with monkeypatch.context() as patch:
        at_step(patch, 7, kill_worker)
        with pytest.raises(RuntimeError, match="a loading process died"):
            run(config)
    with started("effasr.train", recipe_of(config), size=1) as ranks:
        wait_for(tmp_path / "killed", 12, ranks)
    assert not (tmp_path / "killed" / "checkpoints" / f"step_{STEPS:08d}").exists()
    assert run(config) == 0
    assert_same_end(tmp_path / "killed", tmp_path / "straight")


LAMB = OptimizerConfig(name="lamb", lr=0.01)
MUON, FUSED = OptimizerConfig(name="muon"), OptimizerConfig(implementation="fused")
WSD = ScheduleConfig(name="wsd", warmup_steps=1)
EAGER = DiagnosticsConfig(ctc_epochs=1, ctc_steps=0, validations=2)
PARTS = ("encoder.layers.*.conv", "decoder.embed_tokens")
LSTM = TransducerConfig(width=12, joint=12, dropout=0.1)
LEARNT = replace(TEXT_ENCODER, shared_layers=1, durations="learnt")
STATELESS = replace(LSTM, predictor="stateless")
SILENCE = {"silence_padding": SilencePaddingConfig(seconds=0.2)}
BUCKETED = {"strategy": "sync_bucketed_2d", "buckets": 3}

# Of each run: its fixture, the loop and other settings; "model" has the fields that differ.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "text": ("make_with_text", {}, {}),
    "text of learnt durations": ("make_with_text", {}, {"model": {"text_encoder": LEARNT}}),
    "llama": ("make_talks", {}, {"kind": "llama"}),
    "t5": ("make_talks", {}, {"kind": "t5", "speech_input": "decoder"}),
    "bart": ("make_talks", {}, {"kind": "bart", "speech_input": "encoder"}),
    "times": ("make_timed", {}, {}),
    "teacher": ("make_with_teacher", {"teacher": TeacherConfig(after_step=1)}, {}),
    "pretraining": ("make_pretraining", {"validates": True}, {}),
    "lora": ("make_lora_config", {}, {}),
    "lora by language": ("make_by_language", {"validates": True}, {}),
    "freeze": ("make_config", {"freeze": PARTS}, {}),
    "mixed": ("make_mixed", {}, {}),
    "diagnostics": ("make_config", {"validates": True, "diagnostics": EAGER}, {}),
    "lamb": ("make_config", {}, {"optimizer": LAMB}),
    "muon": ("make_config", {}, {"optimizer": MUON, "schedule": WSD}),
    "float16": ("make_config", {"precision": "float16"}, {}),
    "fused": ("make_config", {"ema_decay": 0.9}, {"optimizer": FUSED}),
    "random": ("make_config", {}, {"data": {"strategy": "random", "padded": True}}),
    "bucketed": ("make_config", {}, {"data": BUCKETED | {"padded": True}}),
    "lstm": ("make_config", {"validates": True}, {"model": {"transducer": LSTM}}),
    "stateless": ("make_config", {"validates": True}, {"model": {"transducer": STATELESS}}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.representative(case=["random", "muon", "times", "t5"])
def test_an_interrupted_run_ends_alike(case, request, model_config, tones, tmp_path):
    """Validations that a stop puts off come first when the run goes on, after the last step too."""
    maker, training, settings = CASES[case]
    make = partial(request.getfixturevalue(maker), **settings)
    if "model" in settings:
        model = replace(model_config, decoder=None, **settings["model"])
        make = partial(make, model=model, loss=LossConfig())
    # Lines of two steps, so that runs stop in the middle of one.
    loop = {"max_steps": 8, "checkpoint_every": 3, "validate_every": 3, "log_every": 2} | training
    if loop.pop("validates", False):
        make = partial(make, data={"validation": str(tones / "test.jsonl")})
    assert run(make(name="straight", training=loop)) == 0
    for stop_at in (3, 5, 8, None):
        assert run(make(name="stopped", training=loop | {"stop_at": stop_at})) == 0
    assert_same_end(tmp_path / "stopped", tmp_path / "straight", 8)
    if "data" in settings:
        with pytest.raises(ValueError, match=r"`data\.strategy` must stay .* but is 'packed'"):
            run(make(name="stopped", data={}))
        data = settings["data"] | {"padded": False}
        with pytest.raises(ValueError, match=r"`data\.padded` must stay True"):
            run(make(name="stopped", data=data))


@pytest.mark.extended
def test_a_run_on_changed_audio_ends_alike(make_config, tmp_path):
    """Also where the noise has moved; what changes the audio must stay."""
    (tmp_path / "noise").mkdir()
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        soundfile.write(tmp_path / f"noise/{name}.wav", 0.1 * rng.standard_normal(9000), 16_000)
    augment = AudioAugmentationConfig(
        noise=NoiseConfig(manifests=f"{tmp_path}/noise"),
        reverberation=ReverberationConfig(simulated=True),
        telephone=TelephoneConfig(),
    )
    data = {"speed_perturbation": (1.0, 1.1), "audio_augmentation": augment, "workers": 1}
    make = partial(make_config, data=data, training={"max_steps": 6})
    recipe = recipe_of(make(name="stopped"))

    def go(*overrides: str) -> int:
        return run(configuration.load(TrainConfig, recipe, overrides))

    assert run(make(name="straight")) == 0
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


@pytest.mark.slow
@pytest.mark.parametrize("maker", ["make_config", "make_with_text"])
@pytest.mark.representative(maker="make_config")
def test_two_ranks_have_the_loss_curve_of_one(maker, request, tmp_path):
    """With dropout and augmentation on, whose draws no number of ranks may change.

    With text, the last micro-batch of one rank is speech, and that of the other text.
    """
    make = request.getfixturevalue(maker)
    assert run(make(name="one", training=LONG)) == 0
    train_on_ranks(make(name="two", training=LONG))
    two, item = metrics(tmp_path / "two"), metrics(tmp_path / "one")
    assert len(item) == STEPS
    blends = [tmp_path / name / "blend.json" for name in ("one", "two")]
    assert not blends[0].exists() or blends[0].read_text() == blends[1].read_text()
    for name in ("loss", "cross_entropy", "ctc", "transducer", "guided", "grad_norm"):
        curve = [line[name] for line in item]
        assert [line[name] for line in two] == pytest.approx(curve, rel=1e-5)
    for name in ("tokens", "audio_seconds", "padding_frames", "padding_tokens", "lr", "epoch"):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in item])
    assert any(line["rank_imbalance"] > 0 for line in two)


@pytest.mark.slow
def test_one_rank_that_is_asked_to_stop_stops_them_all(make_config, tmp_path):
    """Even where the signal goes to its data workers as well, as batch systems send it."""
    config = make_config(training={**LONG, "max_steps": 1000}, data={"workers": 1})
    with started("effasr.train", recipe_of(config), new_session=True) as ranks:
        wait_for(tmp_path / "run", 1, ranks)
        os.killpg(ranks[1].pid, signal.SIGTERM)
        for rank in ranks:
            _, error = rank.communicate(timeout=240)
            assert rank.returncode == 0, error
    last = read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert last < 1000
    assert (tmp_path / "run" / "checkpoints" / f"step_{last:08d}" / "training.pt").is_file()
