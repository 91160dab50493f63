"""Lengths of a run in epochs, in time and by patience; intervals in time; fields without effect."""

import os
import resource
import signal
import time
from dataclasses import replace

import pytest
import torch

from effasr import config as configuration
from effasr.data.loader import Loader
from effasr.data.worker_processes import check_open_files
from effasr.distributed.process_group import DistributedContext
from effasr.evaluation.result import Evaluation
from effasr.optim.schedules import ScheduleConfig
from effasr.training import validation
from effasr.training.config import EvaluationConfig, TrainConfig
from effasr.training.fault_tolerance.stop import StopInterrupt, StopRequest, listening
from effasr.training.resolve import check_effects, resolve
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import IntervalClock, run
from tests.support.run_ranks import train_on_ranks
from tests.training.conftest import at_step
from tests.training.test_exactness import assert_same_end
from tests.training.test_trainer import checkpoint_steps

WORLD = DistributedContext(0, 1, torch.device("cpu"))
EPOCHS = {"max_steps": None, "max_epochs": 3}


def steps_of(folder) -> list[int]:
    return [line["step"] for line in read_lines(folder / "metrics.jsonl")]


def test_epochs_are_the_steps_of_their_plans_on_any_ranks(make_config, tmp_path, capsys):
    config = make_config(training=EPOCHS)
    resolved = resolve(config, None, WORLD)
    steps = sum(resolved.loader.plan(epoch).num_steps for epoch in range(3))
    assert resolved.config.training.max_steps == steps
    parts = [
        Loader(resolved.corpus, config.data, seed=config.seed, rank=rank, world_size=2)
        for rank in range(2)
    ]
    assert sum(part.count_steps(range(n, 3, 2)) for n, part in enumerate(parts)) == steps
    assert run(make_config(training=EPOCHS | {"stop_at": 2})) == 0
    assert f"training.max_epochs=3: {steps} steps" in capsys.readouterr().err
    assert run(config) == 0
    assert f"continuing from step 2 of {steps}" in capsys.readouterr().err
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert lines[-1]["epoch"] == 2
    # The schedule follows: a cosine ends at its floor.
    assert lines[-1]["lr"] == 0
    written = configuration.load(TrainConfig, tmp_path / "run" / "config.yaml").training
    assert (written.max_steps, written.max_epochs) == (steps, None)


def test_the_later_of_two_lengths_replaces_the_other(make_config):
    for overrides, expected in (
        (["training.max_epochs=4"], (None, 4)),
        (["training.max_epochs=4", "training.max_steps=7"], (7, None)),
        (["training.max_epochs=null"], (100_000, None)),
    ):
        loop = configuration.load(TrainConfig, "small", overrides).training
        assert (loop.max_steps, loop.max_epochs) == expected


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("training.lr", "optimizer.lr"),
        ("training.micro_batches", "data.micro_batches"),
        ("epochs", "training.max_epochs"),
        ("training.max_epoch", "max_epochs"),
        ("data.num_workers", "workers"),
    ],
)
def test_an_unknown_field_is_sought_in_other_sections(path, nearest):
    with pytest.raises(ValueError, match=f"`{path}` is an .* field: did you mean .*`{nearest}`"):
        configuration.load(TrainConfig, "small", [f"{path}=3"])


def test_a_clock_tells_which_intervals_are_over_since_they_were_reset(make_config, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(IntervalClock, "now", staticmethod(lambda: now[0]))
    loop = make_config(training={"log_every": "30s", "checkpoint_every": "1.5min"}).training
    clock = IntervalClock(loop)
    for seconds, expected in ((29, 0), (30, 1), (90, 1 + 4)):
        now[0] = seconds
        assert clock.due() == expected
    clock.reset("checkpoint_every")
    now[0] = 179
    assert clock.due() == 1


@pytest.mark.representative(size=1)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_intervals_in_time_are_those_of_rank_0(make_config, tones, tmp_path, size):
    loop = {"log_every": "0.000001s", "checkpoint_every": "0.000001s"}
    loop |= {"validate_every": "1h", "max_steps": 3, "keep": 9, "async_save": False}
    config = make_config(data={"validation": str(tones / "test.jsonl")}, training=loop)
    if size == 1:
        assert run(config) == 0
    else:
        train_on_ranks(config)
    assert steps_of(tmp_path / "run") == checkpoint_steps(tmp_path / "run") == [1, 2, 3]
    lines = read_lines(tmp_path / "run" / "validation.jsonl")
    assert [line["step"] for line in lines] == [3]


def test_a_run_ends_at_its_time_with_a_checkpoint_and_goes_on(
    make_config, tmp_path, monkeypatch, capsys
):
    late = []
    monkeypatch.setattr(StopRequest, "is_late", property(lambda request: bool(late)))
    at_step(monkeypatch, 2, lambda: late.append(True))
    settings = {"max_time": 2, "checkpoint_every": 100, "max_steps": 5}
    assert run(make_config(training=settings)) == 0
    assert "training.max_time is over: stopped at step 3; the same" in capsys.readouterr().err
    assert checkpoint_steps(tmp_path / "run") == [3]
    late.clear()
    assert run(make_config(training=settings)) == 0
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4, 5]


def test_a_limit_of_time_ends_a_phase_without_steps():
    began = time.monotonic()
    with listening(0.2) as request:
        with pytest.raises(StopInterrupt), request.interrupting(WORLD):
            time.sleep(20)
        assert request
        assert request.received is None
    assert time.monotonic() - began < 10


def scored(monkeypatch, *rates: float) -> None:
    values = iter(rates)
    monkeypatch.setattr(Evaluation, "value", lambda *_: next(values))


def test_patience_ends_a_run_and_its_count_outlives_a_stop(
    make_config, tones, tmp_path, monkeypatch, capsys
):
    def start(name: str, **loop) -> None:
        loop = {"patience": 2, "validate_every": 2, "checkpoint_every": 100} | loop
        data = {"validation": str(tones / "test.jsonl")}
        assert run(make_config(name=name, data=data, training=loop)) == 0

    scored(monkeypatch, 0.5, 0.2, 0.3, 0.2)
    start("whole")
    assert "no better wer than 0.2 in 2 validations (training.patience); done" in (
        capsys.readouterr().err
    )
    scored(monkeypatch, 0.5, 0.2, 0.3)
    start("run", stop_at=6)
    # The stop takes precedence over the validation of step 6.
    assert len(read_lines(tmp_path / "run" / "validation.jsonl")) == 2
    scored(monkeypatch, 0.3)
    start("run", stop_at=7)
    scored(monkeypatch, 0.2)
    start("run")
    assert_same_end(tmp_path / "whole", tmp_path / "run", steps=8)
    capsys.readouterr()
    start("run")
    assert "raise training.patience for more" in capsys.readouterr().err
    scored(monkeypatch, 0.1, 0.3)
    start("run", patience=3, max_steps=10)
    assert steps_of(tmp_path / "run")[-1] == 10


@pytest.mark.parametrize("by", ["wer", "cer", "loss"])
def test_the_best_is_chosen_by_a_metric_of_some_sets(make_config, tones, tmp_path, by):
    rows = (tones / "train.jsonl").read_text().replace("train-", f"{tones}/train-")
    (tmp_path / "other.jsonl").write_text("".join(rows.splitlines(keepends=True)[:3]))
    data = {"validation": (str(tones / "test.jsonl"), str(tmp_path / "other.jsonl"))}
    config = make_config(
        data=data,
        training={"max_steps": 1},
        evaluation=EvaluationConfig(best_by=by, best_sets=("other",)),
    )
    assert run(config) == 0
    state = torch.load(
        tmp_path / "run" / "checkpoints" / "step_00000001" / "training.pt", weights_only=True
    )
    name = "cross_entropy" if by == "loss" else by
    line = {line["set"]: line for line in read_lines(tmp_path / "run" / "validation.jsonl")}
    assert state["best"] == line["other"][name]
    with pytest.raises(ValueError, match=r"best_sets` must name .* \(test, other\), .* 'dev'"):
        run(replace(config, name="b", evaluation=EvaluationConfig(best_sets=("dev",))))
    with pytest.raises(ValueError, match=r"best_by` must be auto, wer, cer or loss .* but is bleu"):
        run(replace(config, name="b", evaluation=EvaluationConfig(best_by="bleu")))


def test_noam_takes_the_width_of_the_encoder(make_config):
    config = make_config(schedule=ScheduleConfig(name="noam", warmup_steps=4))
    assert resolve(config, None, WORLD).config.schedule.width == 16


@pytest.mark.parametrize("name", configuration.recipes())
def test_every_field_of_a_recipe_has_an_effect(name):
    check_effects(configuration.load(TrainConfig, name))


@pytest.mark.parametrize(
    ("override", "needs"),
    [
        ("data.buckets=30", "data.strategy=bucketed"),
        ("data.filters.max_tokens_per_second=30", ""),
        ("loss.guided_sigma=0.3", "loss.guided_weight=1"),
        ("optimizer.exempt=[biases]", "optimizer.weight_decay=0.1"),
        ("optimizer.lr_reference_micro_batches=4", "optimizer.lr_scaling=sqrt"),
        ("schedule.steps=9", "schedule.name=cosine"),
        ("schedule.flat_fraction=0.5", "schedule.name=flat_cosine"),
        ("schedule.decay_fraction=0.5", "schedule.name=wsd"),
        ("optimizer.momentum=0.9", "optimizer.name=muon"),
        ("training.patience=2", "data.validation=dev.jsonl"),
        ("training.ema_reference_micro_batches=2", "training.ema_decay=0.9"),
        ("training.gossip.period=3", "training.strategy=adpsgd"),
        ("training.hierarchical.warmup_steps=3", "training.strategy=hierarchical"),
        ("training.profile.steps=3", "training.profile.tool=kineto"),
        ("evaluation.decoding.length_penalty=1", "evaluation.decoding.beam=4"),
        ("model.spec_augment.freq_width=9", "model.spec_augment.freq_masks=1"),
    ],
)
def test_a_field_without_effect_is_refused_unless_it_has_its_default(tmp_path, override, needs):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("optimizer: {weight_decay: 0}\n")
    path, _, _ = override.partition("=")

    def check(*overrides: str) -> None:
        check_effects(configuration.load(TrainConfig, recipe, overrides))

    check()
    if not needs:
        check(override)
        with pytest.raises(ValueError, match=f"`{path}` has no effect unless data.text is not ign"):
            check(override, "data.text=ignored")
        return
    with pytest.raises(ValueError, match=f"`{path}` has no effect unless {needs.split('=')[0]} is"):
        check(override)
    check(override, needs)


def test_what_is_switched_off_is_never_refused(tmp_path):
    """As in a recipe that fine-tunes models with and without a decoder."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {decoder: null, ctc: true}\nloss: {label_smoothing: 0.0}\n")
    check_effects(configuration.load(TrainConfig, recipe))
    with pytest.raises(ValueError, match=r"`loss.label_smoothing` has no effect"):
        check_effects(configuration.load(TrainConfig, recipe, ["loss.label_smoothing=0.2"]))


def test_a_low_limit_of_open_files_is_raised_or_refused(monkeypatch):
    limits = [(256, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.append(pair))
    check_open_files(workers=4, prefetch=2)
    assert limits[-1] == (4096, 4096)
    limits.append((100, 100))
    check_open_files(workers=0, prefetch=2)
    message = (
        r"must be at least 160 with data.workers=4 and data.prefetch=2, but is 100: raise it by"
    )
    with pytest.raises(ValueError, match=message):
        check_open_files(workers=4, prefetch=2)


@pytest.mark.parametrize(("step", "number"), [(2, signal.SIGHUP), (4, signal.SIGUSR2)])
def test_a_stop_in_the_second_dev_set_keeps_what_was_due(
    make_config, tones, tmp_path, monkeypatch, capsys, step, number
):
    """Also at the last step, which has a checkpoint whatever the intervals are."""
    rows = (tones / "train.jsonl").read_text().replace("train-", f"{tones}/train-")
    (tmp_path / "other.jsonl").write_text("".join(rows.splitlines(keepends=True)[:3]))
    data = {"validation": (str(tones / "test.jsonl"), str(tmp_path / "other.jsonl"))}
    loop = {"max_steps": 4, "checkpoint_every": 2, "validate_every": step, "async_save": False}
    assert run(make_config(name="whole", data=data, training=loop)) == 0
    config, calls, evaluate = make_config(data=data, training=loop), [], validation.evaluate

    def stopped(*arguments, **options):
        calls.append(checkpoint_steps(tmp_path / "run"))
        if len(calls) == 2:
            os.kill(os.getpid(), number)
        return evaluate(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(validation, "evaluate", stopped)
        assert run(config) == 0
    assert calls[1][-1] == step
    assert f"stopped at step {step}; the same" in capsys.readouterr().err
    assert run(config) == 0
    assert_same_end(tmp_path / "whole", tmp_path / "run", steps=4)
