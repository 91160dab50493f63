"""What each of two processes does in test_sharding.py; each scenario is a function."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import TextExample, collate, collate_text
from effasr.distributed.process_group import World, joined
from effasr.model.text_encoder import TextEncoderConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.training.config import TrainConfig
from effasr.training.step import train_step
from tests.training.parallel_workers import make, weights
from tests.training.scaling_workers import examples_of, quiet_config, uneven_batch

STEPS = 3
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-4)
ENDS = {"eos_id": 1, "pad_id": 0}


def exact(number: int) -> Batch:
    """Of a size of its own; every fourth is empty, so that it has no row at all."""
    return collate([] if number % 4 == 3 else examples_of(number), **ENDS)


def padded(number: int) -> Batch:
    return collate([] if number % 4 == 0 else examples_of(number), **ENDS, padded=True)


def mixed(number: int) -> Batch:
    """Speech or text, by turns on either rank, and now and then neither."""
    shape, step = StaticShape(30, 40, 4), number // 4
    if (number + step) % 3:
        return uneven_batch(number)
    pairs = [] if step == 2 else [TextExample(str(n), [4, 5, 6 + n], [2], [7]) for n in range(3)]
    return collate_text(pairs, shape, **ENDS)


def train(config: TrainConfig, world: World, make_batch: Callable[[int], Batch]) -> list[Tensor]:
    """Four micro-batches a step, shared by the ranks: losses, norms and the weights."""
    model, trainee = make(config, world)
    found = []
    for step in range(STEPS):
        batches = [make_batch(4 * step + n) for n in range(4)]
        torch.manual_seed(step)
        values = train_step(trainee, batches[world.rank :: world.size], step).values.read()
        assert values[6], "the step was not finite"
        found.append(torch.tensor(values))
    return [*found, *weights(model, trainee), *trainee.statistics]


def alike(
    world: World,
    make_batch: Callable[[int], Batch],
    config: TrainConfig,
    sharded: TrainConfig | None = None,
) -> None:
    """Sharded over two ranks, training is as on one."""
    expected = train(config, World(0, 1, world.device), make_batch)
    loop = replace((sharded or config).training, strategy="fsdp2")
    found = train(replace(sharded or config, training=loop), world, make_batch)
    for x, y in zip(expected, found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def strategies(world: World) -> None:
    """Batches of any size, some of which have no row on one of the ranks."""
    for make_batch in (exact, padded):
        alike(world, make_batch, quiet_config(OPTIMIZER))
    sys.stdout.write("strategies\n")


def with_text(config: TrainConfig) -> TrainConfig:
    text = TextEncoderConfig(layers=2, heads=2, feed_forward=16)
    return replace(config, model=replace(config.model, text_encoder=text))


def text(world: World) -> None:
    """A rank has text where the other has speech."""
    kinds = [[mixed(4 * step + n).source is None for n in range(4)] for step in range(STEPS)]
    assert any(a != b for step in kinds for a, b in zip(step[::2], step[1::2], strict=True))
    alike(world, mixed, with_text(quiet_config(OPTIMIZER)))
    sys.stdout.write("text\n")


def recomputed(world: World) -> None:
    """With layers computed again, each strategy trains as without, and each rank to the bit."""
    config = with_text(quiet_config(OPTIMIZER))
    again = replace(config, training=replace(config.training, activation_checkpointing=True))
    alike(world, mixed, config, again)
    for strategy in ("ddp", "local_sgd"):
        both = [
            train(replace(c, training=replace(c.training, strategy=strategy)), world, mixed)
            for c in (config, again)
        ]
        assert all(torch.equal(x, y) for x, y in zip(*both, strict=True))
    sys.stdout.write("recomputed\n")


def compiled(world: World) -> None:
    """Layers that are compiled one by one, from one graph for all of a kind."""
    config = quiet_config(OPTIMIZER)
    settings = replace(config.training, compile=True, activation_checkpointing=True)
    alike(world, uneven_batch, config, replace(config, training=settings))
    # Of the encoder and of the decoder.
    assert counters["stats"]["unique_graphs"] == 2, counters["stats"]
    sys.stdout.write("compiled\n")


def everything() -> None:
    # The default backend writes and compiles C++, which takes minutes.
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    with joined("cpu", timeout_s=60) as world:
        for scenario in (strategies, text, recomputed, compiled):
            scenario(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
