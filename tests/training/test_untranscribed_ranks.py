"""Training on audio without text over several ranks, and by replaying a recorded step."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.data.config import DataConfig
from effasr.distributed.process_group import DistributedContext
from effasr.model.best_rq import BestRQConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.training import build
from effasr.training.config import LossConfig, TeacherConfig, TrainConfig
from effasr.training.resolve import resolve_config
from effasr.training.step import TrainState, train_step
from tests.support.quiet_run import VOCABULARY, make, quiet_config, weights
from tests.support.run_ranks import check_ranks
from tests.training.test_cuda_graph import graphed

SHAPE = StaticShape(60, 40, 4)
STEPS = 4


def pretraining(**training) -> TrainConfig:
    config = quiet_config(OptimizerConfig(lr=1e-2, eps=1e-4), **training)
    best_rq = BestRQConfig(codebooks=2, codes=16, code_width=4, span_s=0.16)
    model = replace(config.model, decoder=None, ctc=False, best_rq=best_rq)
    data = replace(config.data, text="ignored")
    return resolve_config(replace(config, model=model, data=data, loss=LossConfig()), None)


def teaching() -> TrainConfig:
    plain = quiet_config(OptimizerConfig(lr=1e-2, eps=1e-4))
    loop = replace(plain.training, ema_decay=0.9, teacher=TeacherConfig(after_step=1))
    data = DataConfig(text="optional", micro_batches=4, frame_budget=60)
    return resolve_config(replace(plain, training=loop, data=data), None)


def batch_of(number: int, *, pretrain: bool) -> Batch:
    draw = np.random.default_rng(number)
    examples = []
    for n in range(1 + number % 3):
        audio = draw.normal(size=9_000).astype(np.float32)
        text = draw.integers(4, VOCABULARY, size=4).tolist()
        if pretrain or n:
            examples.append(
                Example(f"{number}-{n}", audio, [], None, reserved=0 if pretrain else 9)
            )
        else:
            examples.append(Example(f"{number}-{n}", audio, [2, 3], text))
    shape = replace(SHAPE, token_budget=1) if pretrain else SHAPE
    return collate(examples, shape, eos_id=1, pad_id=0)


def train(state: TrainState, own: slice, *, pretrain: bool) -> list[float]:
    values: list[float] = []
    for step in range(STEPS):
        batches = [batch_of(4 * step + n, pretrain=pretrain) for n in range(4)]
        places = range(4)[own]
        report = train_step(state, batches[own], step, places=list(places))
        figures = report.read()
        assert figures["finite"], "the step was not finite"
        values += [*figures.values(), *report.counts.read()[:2]]
    return values


def results(
    config: TrainConfig, ranks: DistributedContext, own: slice, *, recorded: bool = False
) -> list[Tensor]:
    model, state = make(config, ranks)
    pretrain = config.model.best_rq is not None
    # Those of the model that computes, which is another one when sharded.
    (gauge,) = build.build_gauges(state).values()
    if recorded:
        state = graphed(model, state)
    values = train(state, own, pretrain=pretrain)
    counts = gauge.state_dict()["counts"].double() if pretrain else gauge.state_dict()["sums"][0]
    counts = ranks.all_reduce(counts.clone())
    assert counts.sum() > 0
    return [torch.tensor(values), counts, *weights(model, state)]


def assert_alike(first: list[Tensor], second: list[Tensor]):
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def assert_as_one(context: DistributedContext, config: TrainConfig, alone: TrainConfig):
    item = results(alone, DistributedContext(0, 1, context.device), slice(None))
    assert_alike(item, results(config, context, slice(context.rank, None, 2)))


def over_ranks(context: DistributedContext):
    """Two ranks make the steps of one: the same codes, masks, labels and counts."""
    for config in (pretraining(), teaching(), pretraining(strategy="fsdp2")):
        assert_as_one(context, config, teaching() if config.training.teacher else pretraining())


def compiled(context: DistributedContext):
    # The default backend writes and compiles C++, which takes minutes.
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    assert_as_one(context, pretraining(strategy="fsdp2", compile=True), pretraining())


@pytest.mark.extended
@pytest.mark.parametrize("work", [over_ranks, compiled])
def test_two_ranks_make_the_steps_of_one(work):
    check_ranks(work, size=2, limit_s=240)


ALONE = DistributedContext(0, 1, torch.device("cpu"))


@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.extended
def test_a_compiled_step_is_that_step():
    first, second = (
        results(pretraining(compile=is_compiled), ALONE, slice(None))
        for is_compiled in (False, True)
    )
    assert_alike(first, second)


def test_a_recorded_step_is_that_step():
    for config in (pretraining(), teaching()):
        first, second = (
            results(config, ALONE, slice(None), recorded=recorded) for recorded in (False, True)
        )
        assert_alike(first, second)
