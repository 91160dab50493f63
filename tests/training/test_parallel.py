"""Strategies of several processes: the same training, and the same files."""

import shutil
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from effasr.distributed.averager import LocalSGDConfig
from effasr.distributed.grad_sync import DDPGradientSync, FlatGradientSync
from effasr.distributed.process_group import DistributedContext
from effasr.distributed.tensor_files import read_whole
from effasr.model.asr import ASRModel
from effasr.optim.adamw import OptimizerConfig, initialize_state
from effasr.optim.adascale import AdaScaleConfig
from effasr.training import build, cuda_graph
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.step import TrainState, train_step
from effasr.training.strategies.parallelism import average_over_ranks
from effasr.training.trainer import run
from tests.support.quiet_run import VOCABULARY, make, quiet_config, train, uneven_batch, weights
from tests.support.run_ranks import check_ranks, train_on_ranks
from tests.training.conftest import published
from tests.training.test_cuda_graph import record

STEPS = 5


def equal(context: DistributedContext):
    """One process, ddp and fsdp2 train alike; so do their averages of the weights."""
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-4)
    alone, share = DistributedContext(0, 1, context.device), slice(context.rank, None, 2)
    results = []
    for strategy, ranks, own in (
        ("ddp", alone, slice(None)), ("ddp", context, share), ("fsdp2", context, share)
    ):  # fmt: skip
        config = quiet_config(optimizer, strategy=strategy, ema_decay=0.9, clip=0.5)
        model, train_state = make(config, ranks)
        begun = weights(model, train_state)
        losses = train(model, train_state, range(STEPS), own)
        trained = weights(model, train_state)
        assert any((x - y).abs().max() > 0.01 for x, y in zip(begun, trained, strict=True))
        assert train_state.average is not None
        with train_state.average.in_place():
            averaged = weights(model, train_state)
        results.append([*trained, *averaged, torch.tensor(losses)])
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-5, atol=1e-5)
    parts = sum(cast(DTensor, p).to_local().numel() for p in train_state.model.parameters())
    total = sum(p.numel() for p in model.parameters())
    assert parts < 0.6 * total


def recorded(context: DistributedContext):
    """Ranks that replay a graph each, and add up gradients afterwards, train as with ddp."""
    # A recording that a CPU can replay.
    cuda_graph.check_recordable = lambda model, context: None
    cuda_graph._capture = record
    share, results = slice(context.rank, None, 2), []
    for name in ("ddp", "graph", "local_sgd", "local_sgd with graph"):
        strategy, is_recorded = name.split()[0], name.endswith("graph")
        config = quiet_config(
            OptimizerConfig(lr=1e-2, eps=1e-4),
            strategy="ddp" if strategy == "graph" else strategy,
            local_sgd=LocalSGDConfig(period=2, warmup_steps=1),
            cuda_graph=is_recorded,
            clip=0.5,
        )
        model = build.build_model(config, VOCABULARY, None, context.device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(context.rank)  # All begin with the weights of rank 0.
        train_state = build.build_train_state(config, model, context)
        # As learners begin, which must leave each gradient where ranks exchange it.
        initialize_state(train_state.optimizer)
        assert (train_state.graph is not None) == is_recorded
        kind = FlatGradientSync if is_recorded else DDPGradientSync
        assert isinstance(train_state.grad_sync, kind)
        losses = train(model, train_state, range(4), share)
        results.append([*weights(model, train_state), torch.tensor(losses)])
    for with_ddp, with_graph in (results[:2], results[2:]):
        torch.testing.assert_close(with_ddp, with_graph, rtol=1e-5, atol=1e-5)


def half_precision(context: DistributedContext):
    """In bfloat16, fsdp2 gathers parameters in it; the losses are those of autocast."""
    losses = []
    for strategy in ("ddp", "fsdp2"):
        config = quiet_config(OptimizerConfig(), strategy=strategy, precision="bfloat16")
        model, train_state = make(config, context)
        losses.append(train(model, train_state, range(3), slice(context.rank, None, 2)))
        assert all(p.dtype == torch.float32 for p in train_state.model.parameters())
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=0.02, atol=0.0)


def local(context: DistributedContext):
    """Ranks go apart after the warm-up, and meet at the mean at the end of each period."""
    settings = LocalSGDConfig(period=3, warmup_steps=2)
    optimizer = OptimizerConfig(lr=1e-2)
    share = slice(context.rank, None, 2)
    config = quiet_config(optimizer, strategy="local_sgd", local_sgd=settings, ema_decay=0.9)
    model, train_state = make(config, context)
    reference, plain = make(quiet_config(optimizer, ema_decay=0.9), context)
    for step in range(8):
        before = []
        averager = train_state.averager
        after = averager.after

        def seen(step: int, before=before, after=after):
            before += [p.detach().clone() for p in model.parameters()]
            after(step)

        object.__setattr__(averager, "after", seen)
        train(model, train_state, range(step, step + 1), share)
        object.__setattr__(averager, "after", after)
        now = weights(model, train_state)
        other_items = context.all_gather(now)
        alike = all(torch.equal(x, y) for x, y in zip(*other_items, strict=True))
        assert alike == (step < 2 or step in (4, 7)), step
        if step < 2:
            train(reference, plain, range(step, step + 1), share)
            torch.testing.assert_close(now, [*reference.parameters()])
        if step in (4, 7):
            for x, *both in zip(now, *context.all_gather(before), strict=True):
                torch.testing.assert_close(x, torch.stack(both).mean(0))
    train(model, train_state, range(8, 9), share)
    mine = everything_of(model, train_state)
    means = [torch.stack(both).mean(0) for both in zip(*context.all_gather(mine), strict=True)]
    assert any(not torch.equal(x, y) for x, y in zip(mine, means, strict=True))
    average_over_ranks(train_state, context)
    torch.testing.assert_close(everything_of(model, train_state), means)


def everything_of(model: ASRModel, train_state: TrainState) -> list[Tensor]:
    assert train_state.average is not None
    moments = [
        value.clone()
        for p in model.parameters()
        for name, value in train_state.optimizer.state[p].items()
        if name.startswith("exp_avg")
    ]
    averages = [value.clone() for value in train_state.average.average.values()]
    return [*weights(model, train_state), *averages, *moments]


def broken(context: DistributedContext):
    """A gradient that is not finite on one rank alone: no rank makes the update."""
    settings = LocalSGDConfig(period=100, warmup_steps=0)
    config = quiet_config(OptimizerConfig(), strategy="local_sgd", local_sgd=settings)
    model, train_state = make(config, context)
    before = weights(model, train_state)
    first = next(model.parameters())
    factor = torch.nan if context.rank == 1 else 1.0
    handle = first.register_hook(lambda gradient: gradient * factor)
    report = train_step(train_state, [uneven_batch(context.rank)], 0)
    assert report.read()["loss"] == report.read()["loss"]
    assert not report.read()["finite"]
    assert all(torch.equal(x, y) for x, y in zip(before, weights(model, train_state), strict=True))
    handle.remove()
    assert train_step(train_state, [uneven_batch(2 + context.rank)], 1).read()["finite"]


def test_two_ranks_train_as_each_strategy_says():
    check_ranks(equal, recorded, half_precision, local, broken)


@pytest.mark.slow
@pytest.mark.extended
def test_a_run_goes_on_with_another_strategy(make_config, tones, tmp_path):
    """On one, on two with fsdp2, and on one again."""
    # The gradient of a key's bias is rounding noise, which Adam would magnify.
    settings = {
        "optimizer": OptimizerConfig(eps=1e-4),
        "data": {"validation": [str(tones / "test.jsonl")]},
    }
    loop = {"validate_every": 4}
    assert run(make_config(name="straight", training=loop, **settings)) == 0
    assert run(make_config(training=loop | {"stop_at": 3}, **settings)) == 0
    sharded = loop | {"strategy": "fsdp2", "stop_at": 9, "threads": 1}
    train_on_ranks(make_config(training=sharded, **settings))
    assert run(make_config(training=loop, **settings)) == 0
    ours, theirs = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("run", "straight"))
    assert [line["step"] for line in ours] == list(range(1, 13))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert [line["step"] for line in read_lines(tmp_path / "run" / "validation.jsonl")] == [
        4,
        8,
        12,
    ]
    expected = published(tmp_path / "straight" / "checkpoints" / "step_00000012")
    got = published(tmp_path / "run" / "checkpoints" / "step_00000012")
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        # Ranks have running statistics of their own batches, of which the mean is kept.
        if "running" not in name and "tracked" not in name:
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "local_sgd"])
@pytest.mark.representative(strategy="fsdp2")
def test_two_ranks_go_on_to_the_last_bit(make_config, tmp_path, strategy):
    local_sgd = LocalSGDConfig(period=3, warmup_steps=1)
    loop = {"strategy": strategy, "local_sgd": local_sgd, "threads": 1, "max_steps": 8}
    newest = tmp_path / "run" / "checkpoints" / "step_00000008"
    ends = []
    for _ in range(2):
        train_on_ranks(make_config(training=loop))
        ends.append(published(newest) | read_whole(newest / "training"))
        parts = [file.stat().st_size for file in (newest / "training").glob("*.distcp")]
        # As if the run had been killed after the checkpoint before.
        shutil.rmtree(newest)
    assert ends[0].keys() == ends[1].keys()
    assert any(name.startswith("trained/") for name in ends[0])
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []
    if strategy == "fsdp2":
        # Each rank writes its part.
        assert len(parts) == 2
        assert max(parts) < 0.7 * sum(parts)


FSDP2 = {"strategy": "fsdp2"}
ADASCALE = OptimizerConfig(adascale=AdaScaleConfig(scale=2.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"training": FSDP2 | {"cuda_graph": True}},
         r"`training\.cuda_graph` must be false with training\.strategy fsdp2"),
        ({"training": FSDP2, "data": {"frame_budget": "auto"}},
         r"`data\.frame_budget` must be a number with training\.strategy fsdp2"),
        ({"training": FSDP2, "optimizer": OptimizerConfig(name="lamb")},
         r"`optimizer\.name` must not be lamb with training\.strategy fsdp2"),
        *(
            ({"training": {"strategy": strategy}, "optimizer": ADASCALE},
             r"`optimizer\.adascale` needs training\.strategy ddp")
            for strategy in ("fsdp2", "local_sgd")
        ),
    ],
)  # fmt: skip
def test_what_a_strategy_cannot_do_is_refused(make_config, settings, message):
    with pytest.raises(ValueError, match=message):
        run(make_config(**settings))
