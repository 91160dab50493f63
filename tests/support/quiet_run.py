"""A small model without randomness, and steps of it that ranks share unevenly."""

from dataclasses import replace

import numpy as np
from torch import Tensor

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


def uneven_batch(number: int) -> Batch:
    """Micro-batches of unlike numbers of targets."""
    return collate(examples_of(number), StaticShape(60, 40, 4), eos_id=1, pad_id=0)


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


def make(config: TrainConfig, context: DistributedContext) -> tuple[ASRModel, TrainState]:
    model = build.build_model(config, VOCABULARY, None, context.device)
    return model, build.build_train_state(config, model, context)


def train(model: ASRModel, state: TrainState, steps: range, own: slice) -> list[float]:
    """Four micro-batches a step, the last of which may have no utterance."""
    losses = []
    empty = collate([], StaticShape(60, 40, 4), eos_id=1, pad_id=0)
    for step in steps:
        batches = [uneven_batch(4 * step + n) for n in range(4 if step % 2 else 3)]
        batches += [empty] * (4 - len(batches))
        figures = train_step(state, batches[own], step).read()
        assert figures["finite"], "the step was not finite"
        losses.append(figures["loss"])
    return losses


def weights(model: ASRModel, state: TrainState) -> list[Tensor]:
    with full_weights(state, model):
        return [p.detach().clone() for p in model.parameters()]
