"""Local SGD: every rank makes its own updates, and groups of ranks average at intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from effasr.distributed.averager import LocalUpdates, average_flat, check_warmup
from effasr.distributed.process_group import DistributedContext


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSGDConfig:
    """Schedule of averages.

    Attributes:
        period: Steps from one mean of the weights to the next.
        warmup_steps: Steps before the first mean, in which gradients are exchanged as with ddp
            (post-local SGD, Lin et al. 2020), because weights change most in the beginning.
    """

    period: int = 8
    warmup_steps: int = 1000

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"`period` must be at least 1, but is {self.period}.")
        check_warmup(self.warmup_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class HierarchicalConfig:
    """Schedule and groups of averages (hierarchical SGD, Lin et al. 2020).

    Attributes:
        periods: Maps the number of steps between two averages to the number of neighbouring ranks
            that take part; null stands for all. If several are due, the largest group averages.
            ``{2: 8, 16: null}`` averages the 8 ranks of a node every 2 steps and all every 16.
        warmup_steps: Warm-up steps, see `LocalSGDConfig`.
    """

    periods: dict[int, int | None] = field(default_factory=lambda: {2: 8, 16: None})
    warmup_steps: int = 1000

    def __post_init__(self) -> None:
        if not self.periods or min(self.periods) < 1:
            raise ValueError(f"`periods` must be steps, at least 1 each, but is {self.periods}.")
        if self.periods[max(self.periods)] is not None:
            raise ValueError(
                f"`periods` must have null, all ranks, at its longest, but is {self.periods}: "
                "otherwise the weights of the groups diverge."
            )
        sizes = [self.periods[period] for period in sorted(self.periods)][:-1]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes) or known != sorted(set(known)) or min(known, default=2) < 2:
            raise ValueError(
                "`periods` must have groups of at least 2 ranks that grow with the period, but is "
                f"{self.periods}."
            )
        check_warmup(self.warmup_steps)


class LocalSGD(LocalUpdates):
    """Averages weights in groups of ranks that grow with the period.

    PyTorch's `PeriodicModelAverager` and `HierarchicalModelAverager` leave out each parameter
    without a gradient, also if only one rank has none, which then deadlocks, and count steps from
    the start of the process.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        statistics: Sequence[Tensor],
        context: DistributedContext,
        periods: Mapping[int, int | None],
        warmup_steps: int,
    ) -> None:
        super().__init__(model, optimizer, statistics, context, warmup_steps)
        self._groups = {
            period: _group(size, context) for period, size in sorted(periods.items(), reverse=True)
        }

    def after(self, step: int) -> None:
        done = step + 1 - self._warmup_steps
        for period, ranks in self._groups.items():
            if done > 0 and done % period == 0:
                average_flat(self._tensors, ranks)
                return


def _group(size: int | None, context: DistributedContext) -> DistributedContext:
    """Return the context of the ``size`` neighbouring ranks that include this one."""
    if size is None or size >= context.size:
        return context
    if context.size % size:
        raise ValueError(
            "`training.hierarchical.periods` must have groups that divide the "
            f"{context.size} ranks, but one is of {size}."
        )
    groups = [
        context.new_group(list(range(first, first + size)))
        for first in range(0, context.size, size)
    ]
    group = groups[context.rank // size]
    return DistributedContext(
        context.rank % size, size, context.device, group, timeout=context.timeout
    )
