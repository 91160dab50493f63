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


def over_ranks(context: DistributedContext) -> None:
    """Two ranks make the steps of one: the same codes, masks, labels and counts."""
    alone, share = DistributedContext(0, 1, context.device), slice(context.rank, None, 2)
    for config, pretrain in ((pretraining(), True), (teaching(), False)):
        results: list[list[Tensor]] = []
        for ranks, own in ((alone, slice(None)), (context, share)):
            model, state = make(config, ranks)
            values = train(state, own, pretrain=pretrain)
            results.append([torch.tensor(values), *(p.detach() for p in model.parameters())])
            if model.best_rq is not None:
                counts = model.best_rq.code_counts.double()
                results[-1].append(ranks.all_reduce(counts))
            else:
                assert state.teacher is not None
                labelled = torch.tensor(state.teacher.line()["teacher_utterances"])
                results[-1].append(ranks.all_reduce(labelled.double()))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert results[0][-1].sum() > 0


def sharded(context: DistributedContext) -> None:
    """Two ranks with shards of all weights make the steps of one."""
    assert_as_one(context, pretraining(strategy="fsdp2"))


def compiled(context: DistributedContext) -> None:
    """So they do with layers that are compiled."""
    # The default backend writes and compiles C++, which takes minutes.
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    assert_as_one(context, pretraining(strategy="fsdp2", compile=True))


def assert_as_one(context: DistributedContext, sharded: TrainConfig) -> None:
    alone, share = DistributedContext(0, 1, context.device), slice(context.rank, None, 2)
    results: list[list[Tensor]] = []
    for config, ranks, own in (
        (pretraining(), alone, slice(None)),
        (sharded, context, share),
    ):
        model, state = make(config, ranks)
        values = train(state, own, pretrain=True)
        # Those of the model that computes, which is another one when sharded.
        counts = build.build_gauges(state)["code_use"].state_dict()["counts"].double()
        assert counts.sum() > 0
        results.append([torch.tensor(values), ranks.all_reduce(counts), *weights(model, state)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.extended
def test_two_ranks_make_the_steps_of_one() -> None:
    check_ranks(over_ranks, sharded, size=2, limit_s=240)


@pytest.mark.extended
def test_two_ranks_with_compiled_layers_make_the_steps_of_one() -> None:
    check_ranks(compiled, size=2, limit_s=240)


@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.extended
def test_a_compiled_step_is_that_step() -> None:
    assert_alike(pretraining(), pretraining(compile=True))


def test_a_recorded_step_is_that_step() -> None:
    for config in (pretraining(), teaching()):
        assert_alike(config, config, recorded=True)


def assert_alike(config: TrainConfig, other: TrainConfig, *, recorded: bool = False) -> None:
    context, results = DistributedContext(0, 1, torch.device("cpu")), []
    for settings, is_recorded in ((config, False), (other, recorded)):
        model, state = make(settings, context)
        if is_recorded:
            state = graphed(model, state)
        values = train(state, slice(None), pretrain=model.best_rq is not None)
        results.append([torch.tensor(values), *(p.detach() for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
