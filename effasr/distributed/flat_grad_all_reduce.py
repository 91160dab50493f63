"""An all-reduce of all gradients after the backward instead of during it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from effasr.distributed.process_group import DistributedContext

_PIECE_BYTES = 1 << 28
"""Size of one all-reduce: large enough for the network's speed, and several overlap."""


class FlatGradAllReduce:
    """Keeps the gradients of a model in one tensor per dtype, and averages these over the ranks.

    This is for a backward that a CUDA graph replays: it accumulates gradients in place and runs no
    hook of `DistributedDataParallel`. The communication therefore does not overlap with the
    backward: for n bytes of gradients and W ranks it moves 2 n (W - 1) / W bytes once a step.
    """

    def __init__(self, model: nn.Module, context: DistributedContext) -> None:
        self._context = context
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), group=context.group, group_src=0)
        trained = [p for p in model.parameters() if p.requires_grad]
        self._flat = [_flatten(group) for group in _by_dtype(trained)]
        self._views = [(parameter, parameter.grad) for parameter in trained]

    def __call__(self) -> None:
        """Replace each gradient by its mean over the ranks; on a GPU the host does not wait."""
        if any(parameter.grad is not view for parameter, view in self._views):
            raise RuntimeError("a gradient was replaced, so that the ranks cannot average it")
        works = []
        for flat in self._flat:
            for piece in flat.split(_PIECE_BYTES // flat.element_size()):
                piece.div_(self._context.size)
                works.append(dist.all_reduce(piece, group=self._context.group, async_op=True))
        for work in works:
            work.wait()


def _by_dtype(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dtype, []).append(parameter)
    return list(groups.values())


def _flatten(parameters: list[nn.Parameter]) -> Tensor:
    """Return a flat tensor of zeros whose views are the gradients of the parameters."""
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, piece in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad = piece.view_as(parameter)
    return flat
