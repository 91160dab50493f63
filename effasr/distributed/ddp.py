"""Data parallelism: the same weights on every rank, gradients summed after the backward."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from effasr.distributed.fsdp import accumulating
from effasr.distributed.process_group import World

# torch 2.13 renamed the option, and warns of the old name.
_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"
)


def replicate(model: nn.Module, world: World) -> nn.Module:
    """Wrap a model so that its backward averages gradients over the ranks.

    Every rank starts with rank 0's weights. Running statistics of batch norms stay local; see
    `effasr.distributed.batch_norm`. Every parameter must take part in every forward.
    """
    if world.size == 1:
        return model
    return DistributedDataParallel(
        model,
        process_group=world.group,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        **{_SYNC_BUFFERS: False},  # type: ignore[reportArgumentType]
        gradient_as_bucket_view=True,
    )


def without_exchange(model: nn.Module, yes: bool) -> AbstractContextManager:
    """While in it, gradients add up locally: for all but the last micro-batch of a step."""
    if yes and isinstance(model, DistributedDataParallel):
        return model.no_sync()
    if yes and isinstance(model, FSDPModule):
        return accumulating(model)
    return nullcontext()
