"""`data.frame_budget: auto`, from the recipe to the run; and where calibrations are kept."""

import json
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from effasr import config as configuration
from effasr.data.sampling.bucket_table import BucketTable
from effasr.distributed.process_group import DistributedContext
from effasr.training.calibration import store, trial
from effasr.training.calibration.calibrate import (
    LinearModel,
    Search,
    on_rank_zero,
    read_population,
    resolve_auto_frame_budget,
    target_bytes,
)
from effasr.training.calibration.settings import CalibrationConfig
from effasr.training.calibration.trial import Measurement, Request, TrialFailed, measure
from effasr.training.calibration.workload import Workload
from effasr.training.config import KernelsConfig, LoopConfig, TrainConfig
from effasr.training.fault_tolerance.oom_recovery import OutOfMemory
from effasr.training.loss import LossConfig
from effasr.training.memory import total_bytes
from effasr.training.resolve import find_tokenizer, resolve_config
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run
from tests.support.known_machine import known_machine
from tests.support.preloaded import Preloaded
from tests.support.run_ranks import check_ranks, run_ranks
from tests.training.calibration.conftest import MODEL

ALONE = DistributedContext(0, 1, torch.device("cpu"))
AUTO = {"frame_budget": "auto", "micro_batches": 1}


@pytest.fixture
def trials(monkeypatch):
    return known_machine(monkeypatch, LinearModel(1e8, 1e5))


def test_training_finds_the_budget_and_writes_it_down(make_config, trials, tmp_path, cache, caplog):
    caplog.set_level(logging.WARNING)
    config = make_config(data=AUTO, training={"max_steps": 2})
    assert run(config) == 0
    written = configuration.load(TrainConfig, tmp_path / "run" / "config.yaml")
    budget = written.data.frame_budget
    assert isinstance(budget, int)
    assert (written.data.token_budget, written.data.max_sequences) != (None, None)
    count = len(trials)
    assert 3 <= count <= 12
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


def settled(config: TrainConfig) -> TrainConfig:
    config = resolve_config(config, None)
    return resolve_auto_frame_budget(config, find_tokenizer(config, None), ALONE)


def test_a_number_is_left_alone(make_config, trials):
    config = make_config()
    assert resolve_auto_frame_budget(config, None, ALONE) is config  # type: ignore[arg-type]
    assert trials == []


CHANGES: dict[str, dict] = {
    "precision": {"training": {"precision": "bfloat16"}},
    "no average": {"training": {"ema_decay": None}},
    "bfloat16 weights": {"training": {"bfloat16_weights": True, "precision": "bfloat16"}},
    "recomputed": {"training": {"activation_checkpointing": True}},
    "backends": {"kernels": KernelsConfig(attention="reference")},
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
        settled(make_config(**change | {"data": AUTO | change.get("data", {})}))
        return len(trials) - before

    assert trials_of({}) > 0
    for change in changes:
        assert trials_of(change) > 0, change
    for change in ({}, *changes):
        assert trials_of(change) == 0, change


def test_the_trials_are_of_the_run(make_config, trials):
    config = resolve_config(make_config(data={**AUTO, "micro_batches": 4}), None)
    settled(config)
    (request, *_) = trials
    assert request.micro_batches == 2
    assert request.limit_bytes == int(0.9 * total_bytes(ALONE.device))
    assert configuration.from_mapping(TrainConfig, request.config) == config
    assert request.vocab_size > 4


def test_what_cannot_be_read_is_made_anew(make_config, trials, cache, caplog):
    config = make_config(data=AUTO)
    first = settled(config)
    (file,) = (path for path in cache.iterdir() if not path.name.endswith(".buckets.json"))
    file.write_text(file.read_text()[:100])
    count = len(trials)
    assert settled(config) == first
    assert len(trials) == 2 * count
    assert "cannot be read" in caplog.text
    assert json.loads(file.read_text())["frame_budget"] == first.data.frame_budget


def test_what_cannot_be_kept_is_used(make_config, trials, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert isinstance(settled(make_config(data=AUTO)).data.frame_budget, int)
    assert "XDG_CACHE_HOME names another folder" in caplog.text


def test_the_bucket_table_is_one_that_data_can_read(make_config, trials, cache):
    config = make_config(data=AUTO)
    settled(config)
    (path,) = cache.glob("*.buckets.json")
    selected = store.find(path.name.removesuffix(".buckets.json"))
    assert selected is not None
    table = BucketTable.load(path)
    assert [size for *_, size in selected.bucket_batch_sizes] == list(table.batch_sizes)
    table.assign(read_population(config, find_tokenizer(config, None)).lengths)
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


@pytest.fixture
def request_of(population):
    def make(frames: int, limit: int = 4 << 30) -> Request:
        training = LoopConfig(device="cpu", threads=1)
        config = resolve_config(TrainConfig(model=MODEL, training=training), None)
        work = population.workload(frames, batches=2)
        return Request(configuration.to_mapping(config), 12, "cpu", limit, 2, work)

    return make


def test_a_trial_measures_memory_and_speed(request_of):
    calls: list[float] = []
    started = time.monotonic()
    measured = measure(request_of(400), alive=lambda: calls.append(0.0), every_s=0.2)
    used = time.monotonic() - started
    assert measured.fits, measured.reason
    # Python and PyTorch alone take more than 100 MiB.
    assert 100e6 < measured.peak_bytes < 3e9
    assert 0 < measured.seconds < used
    assert 25 < measured.audio_seconds <= 32
    assert measured.speed == measured.audio_seconds / measured.seconds
    # It was waited for, not slept through: about every 0.2 s somebody was told.
    assert len(calls) >= 2


@pytest.mark.extended
def test_want_of_memory_is_a_result(request_of):
    """The limit is the kernel's: what is taken beyond it does not exist."""
    measured = measure(request_of(3000, limit=450 << 20))
    assert not measured.fits
    assert measured.reason
    assert measured.speed == 0


@pytest.mark.slow
@pytest.mark.extended
def test_the_model_of_memory_predicts_what_is_measured(request_of, population, tmp_path):
    """From the first trials to a budget that is larger than all of them."""
    endless = replace(population, total_frames=10**9)
    settings = CalibrationConfig(objective="memory", margin=0.03)
    target = 560 << 20

    def measured_trial(work: Workload) -> Measurement:
        file = tmp_path / "request.pickle"
        file.write_bytes(pickle.dumps(replace(request_of(400), limit_bytes=target, workload=work)))
        module = "tests.training.calibration.trial_from_file"
        process = Preloaded(module, str(file), str(os.getpid()), env=dict(os.environ))
        out, error = process.communicate(timeout=240)
        return trial._result(process.returncode, out, error)

    result = Search(endless, settings, target, 1, measured_trial).run()
    assert result.limited_by == "memory"
    assert result.replay.error is not None
    assert abs(result.replay.error) < 0.04
    assert 0.9 * target < result.replay.measured.peak_bytes <= target


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "the system killed it"),
        ("import os, sys; sys.stderr.write('std::bad_alloc'); sys.stderr.flush(); os.abort()",
         "it aborted"),
        ("raise ValueError('no such layer')",
         TrialFailed("ended with 1: ValueError: no such layer")),
        ("import time; time.sleep(60)",
         TrialFailed("of 400 frames took more than 1 s, and was stopped")),
    ],
)  # fmt: skip
def test_how_a_process_may_end(request_of, monkeypatch, code, result):
    monkeypatch.setattr(trial, "_COMMAND", [sys.executable, "-c", code])
    options = {"timeout_s": 1.0, "every_s": 0.2} if "sleep" in code else {}
    if isinstance(result, str):
        assert measure(request_of(400)) == Measurement(fits=False, reason=result)
        return
    with pytest.raises(TrialFailed, match=str(result)):
        measure(request_of(400), **options)


def test_a_trial_does_not_take_itself_for_a_rank(monkeypatch):
    local = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "PATH": "p"}
    assert trial._environment(local).keys() == {"PATH", "PYTHONPATH"}
    assert replace(Measurement(fits=True), seconds=2.0, audio_seconds=6.0).speed == 3.0
