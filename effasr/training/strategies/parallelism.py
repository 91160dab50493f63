"""Distribution of a model, its optimizer and its weights over ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from effasr.distributed.averager import Averager, average_each
from effasr.distributed.ddp import replicate
from effasr.distributed.delayed_averaging import DelayedAveraging
from effasr.distributed.fsdp import gather, shard
from effasr.distributed.local_sgd import LocalSGD
from effasr.distributed.process_group import DistributedContext
from effasr.training.config import ASYNCHRONOUS, TrainConfig
from effasr.training.cuda_graph.rules import obstacles_of_strategy
from effasr.training.step import TrainState


def check_strategy(config: TrainConfig) -> None:
    """Raise a ValueError for settings that a strategy does not support."""
    strategy = config.training.strategy
    if strategy != "ddp" and config.optimizer.adascale is not None:
        raise ValueError(
            "`optimizer.adascale` needs training.strategy ddp, in which each rank has its whole "
            f"gradient before the all-reduce, but the strategy is {strategy}: change one of them."
        )
    if strategy in ASYNCHRONOUS:
        _check_learners(config)
    if strategy != "fsdp2":
        return
    if config.data.frame_budget == "auto":
        raise ValueError(
            "`data.frame_budget` must be a number with training.strategy fsdp2, because trials run "
            "on one process, which would hold all shards, but is auto: see `peak_memory_bytes` in "
            "metrics.jsonl of a short run, and choose it by that."
        )
    if config.optimizer.name == "lamb":
        raise ValueError(
            "`optimizer.name` must not be lamb with training.strategy fsdp2, because the available "
            "implementations cannot compute norms of sharded parameters: use adamw, or ddp."
        )
    if config.training.bfloat16_weights is True:
        raise ValueError(
            "`training.bfloat16_weights` must be false or auto with training.strategy fsdp2, which "
            "casts the weights that it gathers, but is true: leave it out."
        )
    if config.training.cuda_graph is True:
        for obstacle in obstacles_of_strategy(config):
            raise ValueError(obstacle.message)


def _check_learners(config: TrainConfig) -> None:
    strategy, size = config.training.strategy, config.training.gossip.learner_size
    if config.data.strategy != "packed":
        raise ValueError(
            f"`data.strategy` must be packed with training.strategy {strategy}, whose learners "
            "take the next part of a plan when they are ready, but is "
            f"{config.data.strategy}: lhotse's samplers distribute batches over a fixed number of "
            "ranks. Use packed, or training.strategy ddp."
        )
    if strategy == "adpsgd" and size not in (None, 1):
        raise ValueError(
            "`training.gossip.learner_size` must be 1 or null with training.strategy adpsgd, but "
            f"is {size}: use h_adpsgd for learners of several processes."
        )


def distribute(config: TrainConfig, model: nn.Module, context: DistributedContext) -> nn.Module:
    """Return the model to train: itself, with or without the wrapper of ddp, or a sharded copy.

    With fsdp2, ``model`` stays on the CPU, and `full_weights` fills it. ``training.cuda_graph`` is
    true or false here, and not ``auto``.
    """
    if config.training.cuda_graph is True:
        # See `effasr.training.cuda_graph.recording`.
        return model
    if config.training.strategy != "fsdp2" or context.size == 1:
        return replicate(model, context)
    sharded = copy.deepcopy(model)
    model.cpu()
    in_bfloat16 = is_bfloat16(config.training.precision, context.device)
    shard(sharded, context, torch.bfloat16 if in_bfloat16 else None)
    return sharded


def make_averager(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    statistics: list[Tensor],
    context: DistributedContext,
) -> Averager:
    """Return the averager of a strategy in which all ranks make each step together."""
    settings, arguments = config.training, (model, optimizer, statistics, context)
    if context.size > 1 and settings.strategy == "local_sgd":
        local = settings.local_sgd
        return LocalSGD(*arguments, {local.period: None}, local.warmup_steps)
    if context.size > 1 and settings.strategy == "hierarchical":
        levels = settings.hierarchical
        return LocalSGD(*arguments, levels.periods, levels.warmup_steps)
    if context.size > 1 and settings.strategy == "delayed":
        return DelayedAveraging(*arguments, settings.delayed.warmup_steps)
    return Averager()


def is_bfloat16(precision: str, device: torch.device) -> bool:
    """Return whether ``training.precision`` means bfloat16 on a device."""
    return precision == "bfloat16" or (precision == "auto" and device.type == "cuda")


def has_weight_copies(config: TrainConfig, context: DistributedContext) -> bool:
    """Return whether weights are cast once an update; see ``training.bfloat16_weights``.

    Raises:
        ValueError: They are requested, but matrix products are not in bfloat16.
    """
    settings, device = config.training, context.device
    if settings.bfloat16_weights == "auto":
        return reason_for_autocast(config, device, context.size) is None
    if settings.bfloat16_weights and not is_bfloat16(settings.precision, device):
        raise ValueError(
            "`training.bfloat16_weights` must be false or auto where matrix products are in "
            f"float32, but is true with training.precision {settings.precision} on {device.type}: "
            "leave it out, or set training.precision=bfloat16."
        )
    return settings.bfloat16_weights


def reason_for_autocast(config: TrainConfig, device: torch.device, size: int) -> str | None:
    """Return why ``bfloat16_weights: auto`` leaves casts to autocast on so many ranks, or None."""
    settings = config.training
    if not is_bfloat16(settings.precision, device):
        return f"precision is float32 on {device.type}"
    if device.type == "cpu":
        return "a CPU gains nothing from fewer launches"
    if settings.strategy == "fsdp2" and size > 1:
        return "fsdp2 casts the weights that it gathers"
    return None


def is_sharded(state: TrainState) -> bool:
    """Return whether each rank has only a shard of the weights."""
    return isinstance(state.model, FSDPModule)


@contextmanager
def full_weights(state: TrainState, model: nn.Module) -> Iterator[None]:
    """Give a plain model the current weights, on the device; all ranks enter the block."""
    if not is_sharded(state):
        yield
        return
    model.to(state.context.device)
    gather(state.model, model)
    try:
        yield
    finally:
        model.cpu()


def average_over_ranks(state: TrainState, context: DistributedContext) -> None:
    """Make all ranks equal before a validation or a checkpoint."""
    average = state.average
    state.averager.synchronize([] if average is None else average.average.values())
    average_each(state.statistics, context)
