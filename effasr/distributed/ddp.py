"""Data parallelism: every rank has all weights, and gradients are averaged in the backward."""

from __future__ import annotations

import inspect

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from effasr.distributed.process_group import DistributedContext

# torch 2.13 renamed the option, and warns of the old name.
_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"
)


def replicate(model: nn.Module, context: DistributedContext) -> nn.Module:
    """Wrap a model in `DistributedDataParallel`, where there are several ranks.

    Every rank starts with rank 0's weights. Running statistics of batch norms stay local; see
    `effasr.distributed.batch_norm`. Every parameter must take part in every forward.
    """
    if context.size == 1:
        return model
    return DistributedDataParallel(
        model,
        process_group=context.group,
        device_ids=[context.device] if context.device.type == "cuda" else None,
        **{_SYNC_BUFFERS: False},  # type: ignore[reportArgumentType]
        gradient_as_bucket_view=True,
    )
