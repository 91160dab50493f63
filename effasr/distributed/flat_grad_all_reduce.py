"""Gradients of ranks that are summed when all are there, not while they are computed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from effasr.distributed.process_group import World

# Bytes of one call: many enough for the network's speed, few enough that the first are sent while
# the next are divided.
_PIECE = 1 << 28


class GradientSum:
    """The gradients of a model in one tensor for each dtype, for all ranks to average.

    For a backward that a CUDA graph replays: it adds to gradients where they lie, and no hook of
    `DistributedDataParallel` runs in it. What that hides behind the backward is seen here: for n
    bytes of gradients and W ranks, 2 n (W - 1) / W bytes at the speed of the network, once a step.

    Args:
        model: Whose parameters become those of rank 0; ``grad`` of each that is trained becomes a
            view, which must stay its gradient (``zero_grad(set_to_none=False)``).
        world: The ranks, more than one.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), group=world.group, group_src=0)
        self._flat = [_flatten(group) for group in _by_dtype(model.parameters())]

    def __call__(self) -> None:
        """Replace each gradient by its mean over the ranks; on a GPU the host does not wait."""
        works = []
        for flat in self._flat:
            for piece in flat.split(_PIECE // flat.element_size()):
                piece.div_(self._world.size)
                works.append(dist.all_reduce(piece, group=self._world.group, async_op=True))
        for work in works:
            work.wait()


def _by_dtype(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault(parameter.dtype, []).append(parameter)
    return list(groups.values())


def _flatten(parameters: list[nn.Parameter]) -> Tensor:
    """Zero gradients, one behind the other."""
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, piece in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad = piece.view_as(parameter)
    return flat
