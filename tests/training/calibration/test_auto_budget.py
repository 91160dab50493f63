"""`data.frame_budget: auto`, from the recipe to the run; and where calibrations are kept."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from effasr import config as configuration
from effasr.data.sampling.bucket_table import BucketTable
from effasr.distributed.process_group import DistributedContext
from effasr.training.calibration import store
from effasr.training.calibration.calibrate import (
    on_rank_zero,
    read_population,
    resolve_auto_frame_budget,
    target_bytes,
)
from effasr.training.calibration.search import MemoryModel
from effasr.training.calibration.settings import CalibrationConfig
from effasr.training.config import TrainConfig
from effasr.training.fault_tolerance.oom_recovery import OutOfMemory
from effasr.training.loss import LossConfig
from effasr.training.memory import total_bytes
from effasr.training.resolve import find_tokenizer, resolve_config
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run
from tests.support.known_machine import known_machine
from tests.support.run_ranks import check_ranks, run_ranks

ALONE = DistributedContext(0, 1, torch.device("cpu"))
AUTO = {"frame_budget": "auto", "micro_batches": 1}


@pytest.fixture
def trials(monkeypatch):
    return known_machine(monkeypatch, MemoryModel(1e8, 1e5, 1e4, 10.0))


def test_training_finds_the_budget_and_writes_it_down(make_config, trials, tmp_path, cache, caplog):
    caplog.set_level(logging.WARNING)
    config = make_config(data=AUTO, training={"max_steps": 2})
    assert run(config) == 0
    written = configuration.load(TrainConfig, tmp_path / "run" / "config.yaml")
    budget = written.data.frame_budget
    assert isinstance(budget, int)
    assert (written.data.token_budget, written.data.max_sequences) != (None, None)
    count = len(trials)
    assert 4 <= count <= 12
    assert "there is no calibration for this machine" in caplog.text
    (line, *_) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert line["padding_frames"] < 0.5
    # It goes on with what it began with, and another run finds it.
    assert run(replace(config, training=replace(config.training, max_steps=3))) == 0
    for file in cache.iterdir():
        if not file.name.endswith(".buckets.json"):
            selected = json.loads(file.read_text())
    assert selected["frame_budget"] == budget
    caplog.clear()
    assert run(replace(config, name="other")) == 0
    assert f"data.frame_budget is {budget}" in caplog.text
    assert "as calibrated before" in caplog.text
    assert len(trials) == count


def test_a_number_is_left_alone(make_config, trials):
    config = make_config()
    assert resolve_auto_frame_budget(config, None, ALONE) is config  # type: ignore[arg-type]
    assert trials == []


CHANGES: dict[str, dict] = {
    "precision": {"training": {"precision": "bfloat16"}},
    "no average": {"training": {"ema_decay": None}},
    "bfloat16 weights": {"training": {"bfloat16_weights": True, "precision": "bfloat16"}},
    "recomputed": {"training": {"activation_checkpointing": True}},
    "two recomputed": {"training": {"activation_checkpointing": 2}},
    "micro-batches": {"data": {"micro_batches": 2}},
    "target": {"calibration": CalibrationConfig(target_bytes=10**9)},
    "loss": {"loss": LossConfig(ctc_weight=0.3, guided_weight=0.0)},
    "model": {"loss": LossConfig(ctc_weight=0.0)},
}


@pytest.mark.parametrize("names", [("model", "target"), tuple(CHANGES)], ids=["two", "all"])
@pytest.mark.representative(names=("model", "target"))
def test_what_it_depends_on_makes_it_stale(names, make_config, trials, model_config):
    """A change is stale beside those before it, too, and all results are kept."""
    changes = [CHANGES[name] for name in names if name != "model"]
    changes.append(CHANGES["model"] | {"model": replace(model_config, ctc=False)})

    def trials_of(change: dict) -> int:
        before = len(trials)
        provided = change | {"data": AUTO | change.get("data", {})}
        config = resolve_config(make_config(**provided), None)
        resolve_auto_frame_budget(config, find_tokenizer(config, None), ALONE)
        return len(trials) - before

    assert trials_of({}) > 0
    for change in changes:
        assert trials_of(change) > 0, change
    for change in ({}, *changes):
        assert trials_of(change) == 0, change


def test_the_trials_are_of_the_run(make_config, trials):
    config = resolve_config(make_config(data={**AUTO, "micro_batches": 4}), None)
    resolve_auto_frame_budget(config, find_tokenizer(config, None), ALONE)
    (request, *_) = trials
    assert request.micro_batches == 2
    assert request.limit_bytes == int(0.9 * total_bytes(ALONE.device))
    again = configuration.from_mapping(TrainConfig, request.config)
    assert again == config
    assert request.vocab_size > 4


def test_what_cannot_be_read_is_made_anew(make_config, trials, cache, caplog):
    config = resolve_config(make_config(data=AUTO), None)
    tokenizer = find_tokenizer(config, None)
    first = resolve_auto_frame_budget(config, tokenizer, ALONE)
    (file,) = (path for path in cache.iterdir() if not path.name.endswith(".buckets.json"))
    file.write_text(file.read_text()[:100])
    count = len(trials)
    assert resolve_auto_frame_budget(config, tokenizer, ALONE) == first
    assert len(trials) == 2 * count
    assert "cannot be read" in caplog.text
    assert json.loads(file.read_text())["frame_budget"] == first.data.frame_budget


def test_what_cannot_be_kept_is_used(make_config, trials, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    config = resolve_config(make_config(data=AUTO), None)
    settled = resolve_auto_frame_budget(config, find_tokenizer(config, None), ALONE)
    assert isinstance(settled.data.frame_budget, int)
    assert "XDG_CACHE_HOME names another folder" in caplog.text


def test_the_bucket_table_is_one_that_data_can_read(make_config, trials, cache):
    config = resolve_config(make_config(data=AUTO), None)
    tokenizer = find_tokenizer(config, None)
    resolve_auto_frame_budget(config, tokenizer, ALONE)
    (path,) = cache.glob("*.buckets.json")
    selected = store.find(path.name.removesuffix(".buckets.json"))
    assert selected is not None
    table = BucketTable.load(path)
    assert [size for *_, size in selected.bucket_batch_sizes] == list(table.batch_sizes)
    table.assign(read_population(config, tokenizer).lengths)
    assert abs(selected.prediction_error) < 0.01
    assert store.find("nothing") is None


def test_the_host_is_shared_by_its_processes():
    whole = target_bytes(CalibrationConfig(target_share=0.5), ALONE.device, {})
    half = target_bytes(
        CalibrationConfig(target_share=0.5), ALONE.device, {"LOCAL_WORLD_SIZE": "2"}
    )
    assert half == pytest.approx(whole / 2, abs=1)
    assert target_bytes(CalibrationConfig(target_bytes=7), ALONE.device, {}) == 7
    assert 2**28 < total_bytes(ALONE.device) < 2**50


def wait(context: DistributedContext):
    def work(alive: Callable[[], None]) -> str:
        for _ in range(13):
            time.sleep(0.4)
            alive()
        return f"found on {context.rank}"

    assert on_rank_zero(work, context, 0.5) == "found on 0"


def fail(context: DistributedContext):
    def work(alive: Callable[[], None]) -> str:
        alive()
        raise OutOfMemory("nothing fits")

    on_rank_zero(work, context, 0.0)


def test_the_other_ranks_wait_longer_than_a_collective_call_may():
    check_ranks(wait, timeout_s=4.0)


def test_an_error_on_rank_zero_reaches_the_others():
    first, second = run_ranks(fail, timeout_s=20.0)
    assert "OutOfMemory: nothing fits" in first.stderr
    assert "PeerFailed: rank 0: nothing fits" in second.stderr
