"""A small model without randomness, and steps of it that ranks share unevenly."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.distributed.process_group import DistributedContext
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.schedules import ScheduleConfig
from effasr.training import build
from effasr.training.config import LoopConfig, TrainConfig
from effasr.training.resolve import resolve_config
from effasr.training.step import TrainState, train_step
from effasr.training.strategies.parallelism import full_weights

VOCABULARY = 12
ENDS = {"eos_id": 1, "pad_id": 0}
ALONE = DistributedContext(0, 1, torch.device("cpu"))
MakeBatch = Callable[[int], Any]


def uneven_batch(number: int) -> Batch:
    """Micro-batches of unlike numbers of targets."""
    return collate(examples_of(number), StaticShape(60, 40, 4), **ENDS)


def empty_or_uneven(number: int) -> Batch:
    """Without an utterance at the end of every second step of four."""
    empty = collate([], StaticShape(60, 40, 4), **ENDS)
    return empty if number % 8 == 3 else uneven_batch(number)


def examples_of(number: int) -> list[Example]:
    generator = np.random.default_rng(number)
    return [
        Example(
            id=f"{number}-{n}",
            audio=generator.normal(size=9_000).astype(np.float32),
            prompt=[2, 3],
            text=generator.integers(4, VOCABULARY, size=int(generator.integers(1, 8))).tolist(),
        )
        for n in range(1 + number % 3)
    ]


def quiet_config(optimizer: OptimizerConfig, **training) -> TrainConfig:
    """Nothing random, no batch norm."""
    model = ModelConfig(
        encoder=FastConformerConfig(
            width=16, layers=2, heads=2, feed_forward=16, subsampling_channels=4,
            conv_norm="layer_norm",
        ),
        decoder=DecoderConfig(width=16, layers=1, heads=2, feed_forward=16),
        ctc=True,
    )  # fmt: skip
    loop = LoopConfig(max_steps=20, **training)
    schedule = ScheduleConfig(warmup_steps=3)
    config = TrainConfig(model=model, training=loop, optimizer=optimizer, schedule=schedule)
    return resolve_config(
        replace(config, data=replace(config.data, micro_batches=4, frame_budget=60)), None
    )


def with_loop(config: TrainConfig, **settings) -> TrainConfig:
    return replace(config, training=replace(config.training, **settings))


def make(config: TrainConfig, context: DistributedContext) -> tuple[ASRModel, TrainState]:
    model = build.build_model(config, VOCABULARY, None, context.device)
    return model, build.build_train_state(config, model, context)


def train(
    state: TrainState, steps: range, context: DistributedContext, make_batch: MakeBatch
) -> list[Tensor]:
    """Figures of steps of four micro-batches each, which ranks share."""
    result = []
    for step in steps:
        batches = [make_batch(4 * step + n) for n in range(4)][context.rank :: context.size]
        torch.manual_seed(step)
        report = train_step(state, batches, step)
        figures = report.read()
        assert figures["finite"], "the step was not finite"
        result.append(torch.tensor([*figures.values(), *report.counts.read()[:2]]))
    return result


def outcome(
    config: TrainConfig,
    context: DistributedContext,
    make_batch: MakeBatch = empty_or_uneven,
    change: Callable[[ASRModel, TrainState], TrainState] = lambda model, state: state,
    steps: int = 3,
) -> list[Tensor]:
    """Figures of each step, and the weights, averages and counts after them."""
    model, state = make(config, context)
    begun = weights(model, state)
    # Those of the model that computes, which is another one when sharded. Experts count batches,
    # of which ranks without a row have none.
    gauges = [x for name, x in build.build_gauges(state).items() if name != "expert_use"]
    state = change(model, state)
    result = train(state, range(steps), context, make_batch)
    ended = weights(model, state)
    assert any((x - y).abs().max() > 0.005 for x, y in zip(begun, ended, strict=True))
    result += [*ended, *state.statistics]
    if state.average is not None:
        with state.average.in_place():
            result += weights(model, state)
    counts = tree_leaves([gauge.state_dict() for gauge in gauges])
    return [*result, *(context.all_reduce(x.double().clone()) for x in counts)]


def alike(
    context: DistributedContext,
    make_batch: MakeBatch,
    config: TrainConfig,
    changed: TrainConfig | None = None,
    strategies: tuple[str, ...] = ("fsdp2",),
):
    """On two ranks, and sharded over them, training is as on one."""
    expected = outcome(config, ALONE, make_batch)
    for strategy in strategies:
        result = outcome(with_loop(changed or config, strategy=strategy), context, make_batch)
        torch.testing.assert_close(expected, result, rtol=1e-5, atol=1e-5)


def weights(model: ASRModel, state: TrainState) -> list[Tensor]:
    with full_weights(state, model):
        return [p.detach().clone() for p in model.parameters()]
