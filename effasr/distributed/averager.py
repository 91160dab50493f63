"""What strategies have in common in which each rank, or group of ranks, makes its own updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from effasr.distributed.process_group import World


class Averager(Protocol):
    """Brings the weights of ranks together that do not exchange every gradient."""

    def is_local(self, step: int) -> bool:
        """Whether the gradients of a step, counted from 0, are not exchanged."""
        ...

    def before(self, step: int) -> None:
        """Called before the first forward of a step."""
        ...

    def after(self, step: int) -> None:
        """Called after the update of a step."""
        ...

    def settle(self, others: Iterable[Tensor] = ()) -> None:
        """Give all ranks the mean of their weights and moments, as a checkpoint holds them.

        Args:
            others: More to average.
        """
        ...


@torch.no_grad()
def average(tensors: Sequence[Tensor], world: World) -> None:
    """Replace float32 tensors by their mean over ranks, all at once, in place."""
    mean = world.sum(torch.cat([tensor.reshape(-1) for tensor in tensors])).div_(world.size)
    pieces = mean.split([tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))


@torch.no_grad()
def add_flat(tensors: Sequence[Tensor], change: Tensor) -> None:
    """Add to tensors, in place, what lies end to end in another, (elements of all,)."""
    pieces = change.split([tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.add_(piece.view_as(tensor))


@torch.no_grad()
def settle(
    model: nn.Module, optimizer: torch.optim.Optimizer, others: Iterable[Tensor], world: World
) -> None:
    """Average all that an update changes, over the ranks, in place.

    Args:
        model: Not replicated.
        optimizer: Of its parameters, whose moments are averaged as well.
        others: More to average.
        world: The ranks.
    """
    trained = _trained(model)
    moments = [
        value
        for parameter in trained
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    for tensor in [*trained, *moments, *others]:
        world.sum(tensor.detach()).div_(world.size)


def mixed_tensors(model: nn.Module, statistics: Sequence[Tensor]) -> list[Tensor]:
    """What learners average as they train: the weights, and the statistics of batch norms."""
    return [*(parameter.detach() for parameter in _trained(model)), *statistics]


def _trained(model: nn.Module) -> list[nn.Parameter]:
    """Those that learn; the others are alike on all ranks, and a mean would round them."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def check_warmup(steps: int) -> None:
    """Raises a ValueError for a ``warmup_steps`` that is none."""
    if steps < 0:
        raise ValueError(f"`warmup_steps` must be at least 0, but is {steps}.")
