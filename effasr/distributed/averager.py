"""Averages over ranks: of weights, of optimizer moments, and of batch-norm statistics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from effasr.distributed.process_group import DistributedContext


class Averager:
    """Averages the weights of ranks that make updates of their own.

    This base class averages nothing: gradients are exchanged in every step, so the weights of all
    ranks are equal.
    """

    def is_local(self, step: int) -> bool:
        """Return whether the gradients of a step, counted from 0, are not exchanged."""
        return False

    def before(self, step: int) -> None:
        """Prepare a step; called before its first forward."""

    def after(self, step: int) -> None:
        """Finish a step; called after its update."""

    def synchronize(self, others: Iterable[Tensor] = ()) -> None:
        """Replace weights, moments and ``others`` by their mean over the ranks, in place."""


class LocalUpdates(Averager):
    """Lets ranks make updates of their own after a warm-up, in which gradients are exchanged."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        statistics: Sequence[Tensor],
        context: DistributedContext,
        warmup_steps: int,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._context = context
        self._warmup_steps = warmup_steps
        self._tensors = [*(p.detach() for p in _trained(model)), *statistics]

    def is_local(self, step: int) -> bool:
        return step >= self._warmup_steps

    def synchronize(self, others: Iterable[Tensor] = ()) -> None:
        average_training_state(self._model, self._optimizer, others, self._context)


@torch.no_grad()
def average_flat(tensors: Sequence[Tensor], context: DistributedContext) -> None:
    """Replace float32 tensors by their mean over the ranks in one all-reduce, in place."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    mean = context.all_reduce(flat).div_(context.size)
    pieces = mean.split([tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))


@torch.no_grad()
def average_each(tensors: Iterable[Tensor], context: DistributedContext) -> None:
    """Replace each tensor by its mean over the ranks, in place, one tensor at a time."""
    for tensor in tensors:
        context.all_reduce(tensor.detach()).div_(context.size)


@torch.no_grad()
def add_flat(tensors: Sequence[Tensor], delta: Tensor) -> None:
    """Add a flat tensor to the tensors whose elements it concatenates; the host does not wait."""
    sizes = [tensor.numel() for tensor in tensors]
    if delta.shape != (sum(sizes),):
        raise ValueError(
            f"`delta` must have shape ({sum(sizes)},), the elements of all tensors, but has "
            f"{tuple(delta.shape)}."
        )
    for tensor, piece in zip(tensors, delta.split(sizes), strict=True):
        tensor.add_(piece.to(tensor.device, non_blocking=True).view(tensor.shape))


def average_training_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    others: Iterable[Tensor],
    context: DistributedContext,
) -> None:
    """Average trained parameters, their floating-point moments, and ``others`` over the ranks."""
    trained = _trained(model)
    moments = [
        value
        for parameter in trained
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    average_each([*trained, *moments, *others], context)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters; the others are equal on all ranks, and averaging rounds."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def check_warmup(steps: int) -> None:
    if steps < 0:
        raise ValueError(f"`warmup_steps` must be at least 0, but is {steps}.")
