"""What each of two processes does in test_parallel.py; each scenario is a function."""

import sys
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from effasr.data.batch import StaticShape
from effasr.data.collate import collate
from effasr.distributed.local_sgd import LocalSGDConfig
from effasr.distributed.process_group import World, joined
from effasr.optim.adamw import OptimizerConfig
from effasr.training import build
from effasr.training.config import TrainConfig
from effasr.training.cuda_graph import graph
from effasr.training.step import Trainee, train_step
from effasr.training.strategies import settle, whole
from tests.training.conftest import VOCABULARY
from tests.training.scaling_workers import quiet_config, uneven_batch
from tests.training.test_graph import record

STEPS = 20


def make(config: TrainConfig, world: World) -> tuple[nn.Module, Trainee]:
    model = build.build_model(config, VOCABULARY, None, world.device)
    return model, build.build_trainee(config, model, world)


def train(model: nn.Module, trainee: Trainee, steps: range, own: slice) -> list[float]:
    """Four micro-batches a step, the last of which may have no utterance."""
    losses = []
    empty = collate([], StaticShape(60, 40, 4), eos_id=1, pad_id=0)
    for step in steps:
        batches = [uneven_batch(4 * step + n) for n in range(4 if step % 2 else 3)]
        batches += [empty] * (4 - len(batches))
        values = train_step(trainee, batches[own], step).values.read()
        assert values[6], "the step was not finite"
        losses.append(values[0])
    return losses


def weights(model: nn.Module, trainee: Trainee) -> list[Tensor]:
    with whole(trainee, model):
        return [p.detach().clone() for p in model.parameters()]


def equal(world: World) -> None:
    """One process, ddp and fsdp2 train alike; so do their averages of the weights."""
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-4)
    alone, share = World(0, 1, world.device), slice(world.rank, None, 2)
    results = []
    for strategy, ranks, own in (
        ("ddp", alone, slice(None)), ("ddp", world, share), ("fsdp2", world, share)
    ):  # fmt: skip
        config = quiet_config(optimizer, strategy=strategy, ema_decay=0.9, clip=0.5)
        model, trainee = make(config, ranks)
        begun = weights(model, trainee)
        losses = train(model, trainee, range(STEPS), own)
        trained = weights(model, trainee)
        assert any((x - y).abs().max() > 0.01 for x, y in zip(begun, trained, strict=True))
        assert trainee.average is not None
        with trainee.average.in_place():
            averaged = weights(model, trainee)
        results.append([*trained, *averaged, torch.tensor(losses)])
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    parts = sum(cast(DTensor, p).to_local().numel() for p in trainee.model.parameters())
    total = sum(p.numel() for p in model.parameters())
    assert parts < 0.6 * total
    sys.stdout.write("equal\n")


def recorded(world: World) -> None:
    """Ranks that replay a graph each, and add up gradients afterwards, train as with ddp."""
    share, results = slice(world.rank, None, 2), []
    for name in ("ddp", "graph", "local_sgd", "local_sgd with graph"):
        strategy, is_recorded = name.split()[0], name.endswith("graph")
        config = quiet_config(
            OptimizerConfig(lr=1e-2, eps=1e-4),
            strategy="ddp" if strategy == "graph" else strategy,
            local_sgd=LocalSGDConfig(period=2, warmup_steps=1),
            cuda_graph=is_recorded,
            clip=0.5,
        )
        model = build.build_model(config, VOCABULARY, None, world.device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(world.rank)  # All begin with the weights of rank 0.
        trainee = build.build_trainee(config, model, world)
        assert (trainee.graph is not None) == (trainee.total is not None) == is_recorded
        assert (trainee.exchange is None) == is_recorded
        losses = train(model, trainee, range(6), share)
        results.append([*weights(model, trainee), torch.tensor(losses)])
    for with_ddp, with_graph in (results[:2], results[2:]):
        for x, y in zip(with_ddp, with_graph, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    sys.stdout.write("replayed\n")


def half_precision(world: World) -> None:
    """In bfloat16, fsdp2 gathers parameters in it; the losses are those of autocast."""
    losses = []
    for strategy in ("ddp", "fsdp2"):
        config = quiet_config(OptimizerConfig(), strategy=strategy, precision="bfloat16")
        model, trainee = make(config, world)
        losses.append(train(model, trainee, range(3), slice(world.rank, None, 2)))
        assert all(p.dtype == torch.float32 for p in trainee.model.parameters())
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=0.02, atol=0.0)
    sys.stdout.write("close\n")


def local(world: World) -> None:
    """Ranks go apart after the warm-up, and meet at the mean at the end of each period."""
    settings = LocalSGDConfig(period=3, warmup_steps=2)
    optimizer = OptimizerConfig(lr=1e-2)
    share = slice(world.rank, None, 2)
    config = quiet_config(optimizer, strategy="local_sgd", local_sgd=settings, ema_decay=0.9)
    model, trainee = make(config, world)
    reference, plain = make(quiet_config(optimizer, ema_decay=0.9), world)
    for step in range(8):
        before = []
        averager = trainee.averager
        assert averager is not None
        after = averager.after

        def seen(step: int, before=before, after=after) -> None:
            before += [p.detach().clone() for p in model.parameters()]
            after(step)

        object.__setattr__(averager, "after", seen)
        train(model, trainee, range(step, step + 1), share)
        object.__setattr__(averager, "after", after)
        now = weights(model, trainee)
        others = world.gather(now)
        alike = all(torch.equal(x, y) for x, y in zip(*others, strict=True))
        assert alike == (step < 2 or step in (4, 7)), step
        if step < 2:
            train(reference, plain, range(step, step + 1), share)
            for x, y in zip(now, reference.parameters(), strict=True):
                torch.testing.assert_close(x, y)
        if step in (4, 7):
            for x, *both in zip(now, *world.gather(before), strict=True):
                torch.testing.assert_close(x, torch.stack(both).mean(0))
    train(model, trainee, range(8, 9), share)
    mine = state(model, trainee)
    means = [torch.stack(both).mean(0) for both in zip(*world.gather(mine), strict=True)]
    assert any(not torch.equal(x, y) for x, y in zip(mine, means, strict=True))
    settle(trainee)
    for x, y in zip(state(model, trainee), means, strict=True):
        torch.testing.assert_close(x, y)
    sys.stdout.write("averaged\n")


def state(model: nn.Module, trainee: Trainee) -> list[Tensor]:
    """Weights, their average, and the moments."""
    assert trainee.average is not None
    moments = [
        value.clone()
        for p in model.parameters()
        for name, value in trainee.optimizer.state[p].items()
        if name.startswith("exp_avg")
    ]
    averages = [value.clone() for value in trainee.average.average.values()]
    return [*weights(model, trainee), *averages, *moments]


def broken(world: World) -> None:
    """A gradient that is not finite on one rank alone: no rank makes the update."""
    settings = LocalSGDConfig(period=100, warmup_steps=0)
    config = quiet_config(OptimizerConfig(), strategy="local_sgd", local_sgd=settings)
    model, trainee = make(config, world)
    before = weights(model, trainee)
    first = next(model.parameters())
    factor = torch.nan if world.rank == 1 else 1.0
    handle = first.register_hook(lambda gradient: gradient * factor)
    report = train_step(trainee, [uneven_batch(world.rank)], 0)
    values = report.values.read()
    assert values[0] == values[0]
    assert not values[6]
    assert all(torch.equal(x, y) for x, y in zip(before, weights(model, trainee), strict=True))
    handle.remove()
    assert train_step(trainee, [uneven_batch(2 + world.rank)], 1).values.read()[6]
    sys.stdout.write("left out\n")


def everything() -> None:
    # A recording that a CPU can replay.
    build.check_recordable = lambda model, world: None
    graph._capture = record
    with joined("cpu", timeout_s=60) as world:
        for scenario in (equal, recorded, half_precision, local, broken):
            scenario(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
