from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from effasr.distributed.failures import TrainingFailed
from effasr.distributed.process_group import DistributedContext
from effasr.training.fault_tolerance.nonfinite_guard import NonFiniteGuard
from effasr.training.run_dir.run_directory import RunDirectory, read_lines
from effasr.training.step import StepReport, train_step
from effasr.training.step_stats import HostCopy

WORLD = DistributedContext(0, 1, torch.device("cpu"))


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.open("", 0, tensorboard=False)
    return run


def lines(directory: RunDirectory) -> list[dict]:
    return read_lines(directory.path / "skipped.jsonl")


def test_stop_names_the_one_utterance_to_blame(make_train_state, batches, broken_batch, directory):
    """Although batch norm made the losses of the whole micro-batch NaN."""
    model, train_state = make_train_state()
    report = train_step(train_state, [batches[0], broken_batch], 4)
    assert not report.micro_batches[1][1][:3].isfinite().any()
    before = [statistic.clone() for statistic in train_state.statistics]
    with pytest.raises(TrainingFailed, match=r"step 5: the loss is not finite; utterances: 9-2\."):
        NonFiniteGuard(model, nullcontext, "stop", WORLD, directory.skipped).handle([report], 1)
    assert lines(directory) == [{"step": 5, "reason": "loss", "utterances": ["9-2"]}]
    assert model.training
    assert all(map(torch.equal, train_state.statistics, before))


def reports(batches, steps, loss: float) -> list[StepReport]:
    nothing = HostCopy(torch.zeros(1))
    losses = torch.full((4,), loss)
    return [StepReport(step, 0.1, nothing, nothing, [(batches[0], losses)]) for step in steps]


def test_where_only_the_gradient_is_not_finite_all_are_named(make_train_state, batches, directory):
    guard = NonFiniteGuard(make_train_state()[0], nullcontext, "skip", WORLD, directory.skipped)
    guard.handle(reports(batches, [4, 6], loss=1.0), 2)
    names = ["0-0", "0-1", "0-2"]
    assert lines(directory) == [
        {"step": 5, "reason": "gradient", "utterances": names},
        {"step": 7, "reason": "gradient", "utterances": names},
    ]


def test_losses_that_only_training_makes_nan(make_train_state, batches, directory):
    guard = NonFiniteGuard(make_train_state()[0], nullcontext, "skip", WORLD, directory.skipped)
    (report,) = reports(batches, [0], loss=1.0)
    losses = torch.tensor([1.0, torch.inf, torch.nan, 0.0])
    guard.handle([replace(report, micro_batches=[(batches[0], losses)])], 1)
    assert lines(directory) == [{"step": 1, "reason": "loss", "utterances": ["0-1", "0-2"]}]


def test_skip_gives_up_only_after_very_many_in_a_row(make_train_state, batches, directory):
    guard = NonFiniteGuard(make_train_state()[0], nullcontext, "skip", WORLD, directory.skipped)
    guard.handle(reports(batches, range(400), loss=1.0), 99)
    with pytest.raises(TrainingFailed, match=r"step 1000: 100 steps in a row"):
        guard.handle(reports(batches, [999], loss=1.0), 100)
