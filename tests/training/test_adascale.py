"""AdaScale in a run: on two ranks, over an interruption, and until its end."""

from typing import Any

import pytest
import torch

from effasr.data.batch import Batch
from effasr.distributed.averager import LocalSGDConfig
from effasr.distributed.process_group import DistributedContext
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.adascale import AdaScaleConfig
from effasr.training import build
from effasr.training.config import adascale_scale
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.step import train_step
from effasr.training.step_stats import StepCounts
from effasr.training.strategies.parallelism import full_weights
from effasr.training.trainer import run
from tests.support.quiet_run import (
    ALONE,
    VOCABULARY,
    make,
    quiet_config,
    uneven_batch,
    weights,
    with_loop,
)
from tests.support.run_ranks import check_ranks
from tests.training.test_exactness import assert_same_end

SCALE, CLIP, STEPS = 8.0, 0.1, 3
ADASCALE = OptimizerConfig(adascale=AdaScaleConfig(scale=8.0))


def direct(model, train_state, batches: list[Batch], ranks: int = 1) -> tuple[float, float]:
    """Variance of the step's gradient and its square, from every micro-batch's own gradient.

    Around the mean of the step, or those of ranks.
    """
    counts = StepCounts.from_batches(batches, train_state.context, False, train_state.config.costs)
    total = counts.tensor(train_state.context.device)
    gradients, targets = [], []
    for batch in batches:
        losses = model(batch, label_smoothing=train_state.config.label_smoothing, guided_sigma=None)
        loss = train_state.objective.weigh(losses, StepCounts.targets_of(total))["loss"]
        parts = torch.autograd.grad(loss, list(model.parameters()))
        gradients.append(torch.cat([part.flatten() for part in parts]).double())
        targets.append(batch.num_targets)
    shares = torch.tensor(targets, dtype=torch.float64) / sum(targets)
    spread, square = torch.zeros(()), torch.zeros(())
    for rank in range(ranks):
        share, parts = shares[rank::ranks], torch.stack(gradients[rank::ranks])
        mean = parts.sum(0) / share.sum()
        spread = spread + (share * (parts / share[:, None] - mean).square().sum(1)).sum()
        square = square + share.sum() * mean.square().sum()
    spread = spread / (len(batches) - ranks)
    return spread.item(), max((square - ranks * spread).item(), 0.0)


def gain(context: DistributedContext):
    for name, strategy in (("adamw", "ddp"), ("lamb", "ddp"), ("lamb", "fsdp2")):
        check_gain(context, name, strategy)
    check_gain(context, "adamw", "local_sgd")


def check_gain(context: DistributedContext, name: Any, strategy: Any):
    """Two micro-batches on each of two ranks, with clipping, against a direct computation.

    And against one process, where ranks exchange gradients.
    """
    adascale = AdaScaleConfig(scale=SCALE, smoothing=0.5)
    optimizer = OptimizerConfig(name=name, lr=1e-3, adascale=adascale)
    local_sgd = LocalSGDConfig(period=1, warmup_steps=0)
    config = quiet_config(optimizer, clip=CLIP, local_sgd=local_sgd)
    is_local, models, train_states = strategy == "local_sgd", [], []
    for kind, ranks in ((strategy, context), ("ddp", ALONE)):
        model, state = make(with_loop(config, strategy=kind), ranks)
        models.append(model)
        train_states.append(state)
    plain = build.build_model(config, VOCABULARY, None, context.device)
    averages, progress = None, 0.0
    for step in range(STEPS):
        batches = [uneven_batch(4 * step + n) for n in range(4)]
        assert len({batch.num_targets for batch in batches}) > 2
        with full_weights(train_states[0], models[0]):
            plain.load_state_dict(models[0].state_dict())
        now = direct(plain, train_states[1], batches, 2 if is_local else 1)
        keep = min(0.5, step / (step + 1))
        averages = [
            keep * old + (1 - keep) * new for old, new in zip(averages or now, now, strict=True)
        ]
        variance, square = averages
        expected = (SCALE * variance + square) / (variance + square)
        assert 1 < expected < SCALE
        for train_state, share in (
            (train_states[0], batches[context.rank :: 2]),
            (train_states[1], batches),
        )[: 1 if is_local else 2]:
            report = train_step(train_state, share, step)
            assert report.lr == train_state.config.learning_rate(int(progress))
            assert report.gain is not None
            got, seen, factor = report.gain.read()
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=0.0)
            torch.testing.assert_close(seen, progress + got, rtol=1e-4, atol=0.0)
            torch.testing.assert_close(factor, got**0.5)
            assert report.read()["grad_norm"] > CLIP, "the gradient was not clipped"
            rate = train_state.optimizer.param_groups[0]["lr"]
            torch.testing.assert_close(float(rate), report.lr * factor)
        progress += expected
    ended = [weights(*pair) for pair in zip(models, train_states, strict=True)]
    for ours, alone in () if is_local else zip(*ended, strict=True):
        # A key's bias has a gradient of mere rounding, which Adam makes as large as any.
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-4)
    states = context.all_gather(train_states[0].adascale.state_dict())
    assert states[0] == states[1]


def test_the_gain_of_two_ranks_is_that_of_a_direct_computation():
    check_ranks(gain)


@pytest.mark.extended
def test_a_stopped_run_goes_on_exactly_and_ends_by_progress(make_config, tmp_path):
    assert run(make_config(name="straight", optimizer=ADASCALE)) == 0
    for stop_at in (6, None):
        assert run(make_config(optimizer=ADASCALE, training={"stop_at": stop_at})) == 0
    straight = read_lines(tmp_path / "straight" / "metrics.jsonl")
    last = straight[-1]
    assert_same_end(tmp_path / "run", tmp_path / "straight", last["step"])
    # Steps are worth more than one each, and the end shows in the step after it.
    assert last["step"] < 12 <= straight[-2]["progress"]
    assert straight[-3]["progress"] < 12
    gains = [line["gain"] for line in straight]
    assert all(1 <= gain <= 8 for gain in gains)
    assert last["progress"] == pytest.approx(sum(gains))
    # A run that is done stays so.
    assert run(make_config(optimizer=ADASCALE)) == 0
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == len(straight)


def test_a_run_that_had_none_counts_its_steps(make_config, tmp_path):
    assert run(make_config(training={"max_steps": 4})) == 0
    assert run(make_config(training={"max_steps": 5}, optimizer=ADASCALE)) == 0
    (last,) = read_lines(tmp_path / "run" / "metrics.jsonl")[4:]
    assert last["progress"] == pytest.approx(4 + last["gain"])


def test_what_cannot_be_measured_is_refused(make_config):
    with pytest.raises(ValueError, match=r"`data\.micro_batches` must be at least 2 with .* is 1"):
        run(make_config(data={"micro_batches": 1}, optimizer=ADASCALE))
    with pytest.raises(ValueError, match=r"at least 6 .* and 3 processes or learners .* is 4"):
        adascale_scale(make_config(data={"micro_batches": 4}, optimizer=ADASCALE), 3)
    wide = OptimizerConfig(lr_reference_micro_batches=8, adascale=AdaScaleConfig())
    with pytest.raises(ValueError, match=r"must be at most data\.micro_batches, 2, .* but is 8"):
        run(make_config(optimizer=wide))
    with pytest.raises(ValueError, match=r"`optimizer\.adascale` must be null in float16"):
        run(make_config(training={"precision": "float16"}, optimizer=ADASCALE))
