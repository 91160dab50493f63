"""One of two ranks runs out of memory: the other neither hangs nor learns anything else."""

import itertools
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from effasr.data.batch import Batch
from effasr.distributed.ddp import replicate
from effasr.distributed.grad_sync import DDPGradientSync
from effasr.distributed.process_group import DistributedContext
from effasr.model.asr import ASRModel
from effasr.optim.adamw import OptimizerConfig
from effasr.training.fault_tolerance.oom_recovery import OutOfMemory
from effasr.training.step import TrainState, train_step
from tests.support.quiet_run import make, quiet_config
from tests.support.run_ranks import check_ranks, run_ranks
from tests.training.conftest import make_batch
from tests.training.shortage import shortage

STEPS, MICRO_BATCHES = 3, 3


def quiet(context: DistributedContext, *, one_bucket: bool) -> tuple[ASRModel, TrainState]:
    """Nothing random, no batch norm; by default a bucket of gradients for every few parameters."""
    alone = DistributedContext(0, 1, context.device)
    model, train_state = make(quiet_config(OptimizerConfig(eps=1e-4)), alone)
    wrapped = replicate(model, context)
    if not one_bucket:
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=0.004, gradient_as_bucket_view=True, broadcast_buffers=False
        )
    assert isinstance(wrapped, DistributedDataParallel)
    return model, replace(
        train_state, model=wrapped, context=context, grad_sync=DDPGradientSync(wrapped)
    )


def own(context: DistributedContext, step: int) -> list[Batch]:
    first = step * MICRO_BATCHES * context.size + context.rank
    return [make_batch(first + n * context.size) for n in range(MICRO_BATCHES)]


def train(
    context: DistributedContext, failures: dict[int, int], where: str, **options
) -> tuple[list, nn.Module]:
    model, train_state = quiet(context, **options)
    values = []
    for step in range(STEPS):
        fails = [failures[step]] if step in failures and context.rank == 1 else []
        with shortage(model, *fails, where=where):
            report = train_step(train_state, own(context, step), step)
        values.append(list(report.read().values()))
    return values, model


def recover(context: DistributedContext):
    """In the first step, whose buckets are not yet those of the later ones, and in another."""
    cases = [(False, *case) for case in itertools.product(range(3), ("forward", "backward"))]
    plain, straight = train(context, {}, "forward", one_bucket=False)
    for one_bucket, call, where in [*cases, (True, 2, "forward"), (True, 2, "backward")]:
        case = f"{one_bucket=} {call=} {where=}"
        values, model = train(context, {0: call, 2: call}, where, one_bucket=one_bucket)
        assert [v[8] for v in values] == [1, 0, 1], case
        for x, y in zip(values, plain, strict=True):
            torch.testing.assert_close(x[:8], y[:8], rtol=1e-4, atol=1e-5, msg=case)
        torch.testing.assert_close(
            [*model.parameters()], [*straight.parameters()], rtol=1e-4, atol=1e-5, msg=case
        )
        both = context.all_gather([p.detach() for p in model.parameters()])
        assert all(torch.equal(x, y) for x, y in zip(*both, strict=True)), case


def alone(context: DistributedContext):
    """An utterance that does not fit at all ends every rank, and names itself."""
    model, train_state = quiet(context, one_bucket=True)
    calls = range(20) if context.rank == 1 else []
    try:
        with shortage(model, *calls, where="backward"):
            train_step(train_state, own(context, 0), 0)
    except OutOfMemory as error:
        sys.stdout.write(f"{error}\n")
        raise


@pytest.mark.slow
def test_the_gradient_is_that_without_a_failure_wherever_it_fails():
    check_ranks(recover)


def test_what_does_not_fit_at_all_ends_every_rank():
    first, second = run_ranks(alone, timeout_s=30.0)
    assert first.returncode
    assert second.returncode
    assert "alone does not fit in memory" in second.stdout
    assert "PeerFailed: rank 1: utterance '1-0' alone does not fit" in first.stderr
