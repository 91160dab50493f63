"""The strategies of ``training.strategy``: who holds which weights, and what the files get."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from effasr.distributed.averager import Averager
from effasr.distributed.delayed import DelayedAveraging
from effasr.distributed.local_sgd import LocalSGD
from effasr.distributed.process_group import World
from effasr.distributed.replicate import replicate
from effasr.distributed.shard import gather, like, shard
from effasr.training.config import TrainConfig
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
    if strategy != "fsdp2":
        return
    for name in ("cuda_graph", "compile"):
        if getattr(config.training, name):
            raise ValueError(
                f"`training.{name}` must be false with training.strategy fsdp2, whose gathering of "
                "parameters it cannot record, but is true: set it to false, or use ddp."
            )
    if config.data.strategy != "packed" or config.data.text_share is not None:
        raise ValueError(
            "`training.strategy` must not be fsdp2 with data.strategy "
            f"{config.data.strategy} and data.text_share {config.data.text_share}: ranks gather "
            "layers together, so that each must use every layer in every step. Use data.strategy "
            "packed without text, or training.strategy ddp."
        )


def distribute(config: TrainConfig, model: nn.Module, world: World) -> nn.Module:
    """The model that is trained: itself, replicated, or a sharded copy.

    With fsdp2, ``model`` is left on the CPU, for `whole` to fill.
    """
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
) -> Averager | None:
    """What brings ranks together that make updates of their own; None where none do."""
    settings, what = config.training, (model, optimizer, statistics, world)
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


@torch.no_grad()
def load_trained(trainee: Trainee, model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Set the weights that are trained, where others were loaded to be averaged."""
    target = trainee.model if is_sharded(trainee) else model
    for name, parameter in target.named_parameters():
        parameter.copy_(like(weights[name], parameter))


def settle(trainee: Trainee) -> None:
    """Make all ranks alike, where they are not: before a validation or a checkpoint."""
    if trainee.averager is not None:
        average = trainee.average
        trainee.averager.settle([] if average is None else average.average.values())
