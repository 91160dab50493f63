"""FSDP2: each rank holds a shard of every parameter, of its gradient, and of its moments."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from effasr.distributed.process_group import DistributedContext


def shard(
    model: nn.Module, context: DistributedContext, dtype: torch.dtype | None = None
) -> FSDPModule:
    """Shard a model's parameters over the ranks, in place; all start with rank 0's weights.

    The layers of each outer `nn.ModuleList` are all-gathered one at a time, when they are needed,
    and the rest of the model once per forward, in ``dtype`` or their own. Gradients are averaged in
    float32.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    mesh = init_device_mesh(context.device.type, (context.size,))
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    within: set[nn.Module] = set()
    for module in list(model.modules()):
        # The layers of T5 have a list each, of modules that are needed together.
        if isinstance(module, nn.ModuleList) and module not in within:
            for layer in module:
                within.update(layer.modules())
                # A linear layer in a list may never be called: its owner reads its weight.
                if next(layer.children(), None) is not None:
                    fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


@contextmanager
def no_sync(model: FSDPModule) -> Iterator[None]:
    """Accumulate unsharded gradients locally in the block; a later backward reduces them."""
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)


def watch_gradients(model: nn.Module, see: Callable[[Tensor], None]) -> None:
    """Call ``see`` with each whole gradient of each backward, before ranks exchange it."""
    watched: set[Tensor] = set()

    # Whole parameters are there from the first forward of a sharded module on.
    def watch(module: nn.Module, _: object) -> None:
        for parameter in module.parameters():
            if isinstance(parameter, DTensor) or parameter in watched:
                continue
            watched.add(parameter)
            if parameter.requires_grad:
                parameter.register_hook(see)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(cast("Any", torch.compiler.disable(watch)))


def full_tensor(value: Tensor) -> Tensor:
    """Return the unsharded tensor; all ranks call this for the same tensors."""
    return value.full_tensor() if isinstance(value, DTensor) else value


@torch.no_grad()
def gather(source: nn.Module, target: nn.Module) -> None:
    """Copy the parameters and buffers of a sharded model into an unsharded one."""
    local = dict(target.named_parameters()) | dict(target.named_buffers())
    for name, value in (*source.named_parameters(), *source.named_buffers()):
        local[name].copy_(full_tensor(value))
