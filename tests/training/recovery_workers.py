"""What each of two processes does in test_recovery_ranks.py; each scenario is a function."""

import itertools
import sys
from dataclasses import replace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from effasr.data.batch import Batch
from effasr.distributed.ddp import replicate
from effasr.distributed.ddp_comm_hook import GradientExchange
from effasr.distributed.process_group import World, joined
from effasr.model.asr import ASRModel, ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.training import build
from effasr.training.config import LoopConfig, TrainConfig
from effasr.training.fault_tolerance.oom_recovery import OutOfMemory
from effasr.training.step import Trainee, train_step
from tests.training.conftest import VOCABULARY, make_batch
from tests.training.shortage import shortage

STEPS, MICRO_BATCHES = 3, 3


def quiet(world: World, *, one_bucket: bool) -> tuple[ASRModel, Trainee]:
    """Nothing random, no batch norm; by default a bucket of gradients for every few parameters."""
    model_config = ModelConfig(
        encoder=FastConformerConfig(
            width=16, layers=2, heads=2, feed_forward=16, subsampling_channels=4,
            conv_norm="layer_norm",
        ),
        decoder=DecoderConfig(width=16, layers=1, heads=2, feed_forward=16),
        ctc=True,
    )  # fmt: skip
    config = TrainConfig(model=model_config, training=LoopConfig(max_steps=20))
    config = build.resolve(config, None)
    model = build.build_model(config, VOCABULARY, None, world.device)
    trainee = build.build_trainee(config, model, World(0, 1, world.device))
    wrapped = replicate(model, world)
    if not one_bucket:
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=0.004, gradient_as_bucket_view=True, broadcast_buffers=False
        )
    assert isinstance(wrapped, DistributedDataParallel)
    exchange = GradientExchange(wrapped)
    return model, replace(trainee, model=wrapped, world=world, exchange=exchange)


def own(world: World, step: int) -> list[Batch]:
    first = step * MICRO_BATCHES * world.size + world.rank
    return [make_batch(first + n * world.size) for n in range(MICRO_BATCHES)]


def train(world: World, failures: dict[int, int], where: str, **options) -> tuple[list, nn.Module]:
    """Train for a few steps; in some, a micro-batch of rank 1 fails."""
    model, trainee = quiet(world, **options)
    values = []
    for step in range(STEPS):
        fails = [failures[step]] if step in failures and world.rank == 1 else []
        with shortage(model, *fails, where=where):
            report = train_step(trainee, own(world, step), step)
        values.append(report.values.read())
    return values, model


def recover() -> None:
    """In the first step, whose buckets are not yet those of the later ones, and in another."""
    cases = [(False, *case) for case in itertools.product(range(3), ("forward", "backward"))]
    with joined("cpu", timeout_s=60) as world:
        plain, straight = train(world, {}, "forward", one_bucket=False)
        for one_bucket, call, where in [*cases, (True, 2, "forward"), (True, 2, "backward")]:
            case = f"{one_bucket=} {call=} {where=}"
            values, model = train(world, {0: call, 2: call}, where, one_bucket=one_bucket)
            assert [v[8] for v in values] == [1, 0, 1], case
            for x, y in zip(values, plain, strict=True):
                torch.testing.assert_close(x[:8], y[:8], rtol=1e-4, atol=1e-5, msg=case)
            for x, y in zip(model.parameters(), straight.parameters(), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6, msg=case)
            both = world.gather([p.detach() for p in model.parameters()])
            assert all(torch.equal(x, y) for x, y in zip(*both, strict=True)), case
        sys.stdout.write("recovered\n")


def alone() -> None:
    """An utterance that does not fit at all ends every rank, and names itself."""
    with joined("cpu", timeout_s=30) as world:
        model, trainee = quiet(world, one_bucket=True)
        calls = range(20) if world.rank == 1 else []
        try:
            with shortage(model, *calls, where="backward"):
                train_step(trainee, own(world, 0), 0)
        except OutOfMemory as error:
            sys.stdout.write(f"{error}\n")
            raise


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
