"""The strategies of ``training.strategy``: who holds which weights, and what the files get."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from effasr.distributed.averager import Averager
from effasr.distributed.ddp import replicate
from effasr.distributed.delayed_averaging import DelayedAveraging
from effasr.distributed.fsdp import gather, shard
from effasr.distributed.local_sgd import LocalSGD
from effasr.distributed.process_group import World
from effasr.training.async_sgd.learners import Learners
from effasr.training.async_sgd.weight_averaging import Mixing
from effasr.training.config import LEARNING_APART, TrainConfig
from effasr.training.step import Trainee


def check_strategy(config: TrainConfig) -> None:
    """Refuse what a strategy cannot do.

    Raises:
        ValueError: It is asked for; the message says what to change.
    """
    strategy = config.training.strategy
    if strategy != "ddp" and config.optimizer.adascale is not None:
        raise ValueError(
            "`optimizer.adascale` needs training.strategy ddp, in which each rank has its whole "
            f"gradient before the exchange, but the strategy is {strategy}: set either aside."
        )
    if strategy in LEARNING_APART:
        _check_learners(config)
    if strategy != "fsdp2":
        return
    if config.optimizer.name == "lamb":
        raise ValueError(
            "`optimizer.name` must not be lamb with training.strategy fsdp2, because the libraries "
            "that have it take no norm of parameters of which each rank has a part: use adamw, or "
            "ddp."
        )
    if config.training.cuda_graph:
        raise ValueError(
            "`training.cuda_graph` must be false with training.strategy fsdp2, whose gathering of "
            "parameters it cannot record, but is true: set it to false, or use ddp."
        )


def _check_learners(config: TrainConfig) -> None:
    strategy, size = config.training.strategy, config.training.gossip.learner_size
    if config.data.strategy != "packed":
        raise ValueError(
            f"`data.strategy` must be packed with training.strategy {strategy}, whose learners "
            "each take the next part of a plan when they have time, but is "
            f"{config.data.strategy}: lhotse's samplers deal out batches to a fixed number of "
            "ranks. Use packed, or training.strategy ddp."
        )
    if strategy == "adpsgd" and size not in (None, 1):
        raise ValueError(
            "`training.gossip.learner_size` must be 1 or null with training.strategy adpsgd, but "
            f"is {size}: use h_adpsgd for learners of several processes."
        )


def distribute(config: TrainConfig, model: nn.Module, world: World) -> nn.Module:
    """The model that is trained: itself, as it is or replicated, or a sharded copy.

    With fsdp2, ``model`` is left on the CPU, for `whole` to fill.
    """
    if config.training.cuda_graph:
        # See `effasr.training.cuda_graph.recording`.
        return model
    if config.training.strategy != "fsdp2" or world.size == 1:
        return replicate(model, world)
    trained = copy.deepcopy(model)
    model.cpu()
    in_bfloat16 = is_bfloat16(config.training.precision, world.device)
    shard(trained, world, torch.bfloat16 if in_bfloat16 else None)
    return trained


def averager(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    statistics: list[Tensor],
    world: World,
    learners: Learners | None = None,
) -> Averager | None:
    """What brings ranks together that make updates of their own; None where none do."""
    settings, what = config.training, (model, optimizer, statistics, world)
    if learners is not None:
        return Mixing(model, optimizer, learners, settings.gossip, config.seed)
    if world.size == 1:
        return None
    if settings.strategy == "local_sgd":
        local = settings.local_sgd
        return LocalSGD(*what, {local.period: None}, local.warmup_steps)
    if settings.strategy == "hierarchical":
        levels = settings.hierarchical
        return LocalSGD(*what, levels.periods, levels.warmup_steps)
    if settings.strategy == "delayed":
        return DelayedAveraging(*what, settings.delayed.warmup_steps)
    return None


def is_bfloat16(precision: str, device: torch.device) -> bool:
    """Whether ``training.precision`` means bfloat16 on a device."""
    return precision == "bfloat16" or (precision == "auto" and device.type == "cuda")


def is_sharded(trainee: Trainee) -> bool:
    """Whether each rank has only parts of the weights."""
    return isinstance(trainee.model, FSDPModule)


@contextmanager
def whole(trainee: Trainee, model: nn.Module) -> Iterator[None]:
    """While in it, a plain model has the weights as they are, on the device; all ranks enter it.

    Args:
        trainee: What is trained.
        model: That which `distribute` was given; where nothing is sharded, it has them anyway.
    """
    if not is_sharded(trainee):
        yield
        return
    model.to(trainee.world.device)
    gather(trainee.model, model)
    try:
        yield
    finally:
        model.cpu()


def settle(trainee: Trainee) -> None:
    """Make all ranks alike, where they are not: before a validation or a checkpoint."""
    if trainee.averager is not None:
        average = trainee.average
        trainee.averager.settle([] if average is None else average.average.values())
