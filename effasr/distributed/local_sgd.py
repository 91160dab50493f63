"""Local SGD: every rank makes updates of its own, and now and then some take the mean of theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from effasr.distributed.averager import average, check_warmup, mixed_tensors, settle
from effasr.distributed.process_group import World


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSGDConfig:
    """When ranks average.

    Attributes:
        period: Steps from one mean of the weights to the next.
        warmup_steps: Steps before the first of them, in which gradients are exchanged as with ddp:
            post-local SGD (Lin et al. 2020), for the weights move most in the beginning.
    """

    period: int = 8
    warmup_steps: int = 1000

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"`period` must be at least 1, but is {self.period}.")
        check_warmup(self.warmup_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class HierarchicalConfig:
    """When which ranks average (hierarchical SGD, Lin et al. 2020).

    Attributes:
        periods: How many neighbouring ranks take the mean of their weights, by the steps from one
            such mean to the next; null stands for all. Where several are due, the largest group
            does. ``{2: 8, 16: null}`` averages the 8 of a node every 2 steps, and all every 16.
        warmup_steps: As of local SGD.
    """

    periods: dict[int, int | None] = field(default_factory=lambda: {2: 8, 16: None})
    warmup_steps: int = 1000

    def __post_init__(self) -> None:
        if not self.periods or min(self.periods) < 1:
            raise ValueError(f"`periods` must be steps, at least 1 each, but is {self.periods}.")
        if self.periods[max(self.periods)] is not None:
            raise ValueError(
                f"`periods` must have null, all ranks, at its longest, but is {self.periods}: "
                "otherwise the groups drift apart."
            )
        sizes = [self.periods[period] for period in sorted(self.periods)][:-1]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes) or known != sorted(set(known)) or min(known, default=2) < 2:
            raise ValueError(
                "`periods` must have groups of at least 2 ranks that grow with the period, but is "
                f"{self.periods}."
            )
        check_warmup(self.warmup_steps)


class LocalSGD:
    """The mean of what ranks have of their own, in groups that grow with the period.

    PyTorch's `PeriodicModelAverager` and `HierarchicalModelAverager` would keep the time as well,
    but leave out each parameter without a gradient in place, be it on one rank alone, which then
    waits for the others for ever, and count from the start of the process.

    Args:
        model: Not replicated.
        optimizer: Of its parameters.
        statistics: Of its batch norms.
        world: The ranks, more than one.
        periods: Ranks of a group, None for all, by the steps between two means; all ranks make
            the groups together.
        warmup_steps: Steps before, in which gradients are exchanged.

    Raises:
        ValueError: A size of groups does not divide the ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        statistics: Sequence[Tensor],
        world: World,
        periods: Mapping[int, int | None],
        warmup_steps: int,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._statistics = statistics
        self._world = world
        self._warmup_steps = warmup_steps
        self._groups = {
            period: _group(size, world) for period, size in sorted(periods.items(), reverse=True)
        }

    def is_local(self, step: int) -> bool:
        """Whether the gradients of a step, counted from 0, are not exchanged."""
        return step >= self._warmup_steps

    def before(self, step: int) -> None:
        """Nothing comes before a step."""

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Average the weights and statistics after a step, if it is time to."""
        done = step + 1 - self._warmup_steps
        for period, ranks in self._groups.items():
            if done > 0 and done % period == 0:
                average(mixed_tensors(self._model, self._statistics), ranks)
                return

    def settle(self, others: Iterable[Tensor] = ()) -> None:
        """Give all ranks the mean of their weights and moments, as a checkpoint holds them.

        Args:
            others: More to average.
        """
        settle(self._model, self._optimizer, others, self._world)


def _group(size: int | None, world: World) -> World:
    """The neighbours of this rank, ``size`` with itself."""
    if size is None or size >= world.size:
        return world
    if world.size % size:
        raise ValueError(
            f"`training.hierarchical.periods` must have groups that divide the {world.size} ranks, "
            f"but one is of {size}."
        )
    groups = [
        dist.new_group(list(range(first, first + size))) for first in range(0, world.size, size)
    ]
    return World(
        world.rank % size, size, world.device, cast(dist.ProcessGroup, groups[world.rank // size])
    )
