"""Delayed averaging: the mean of the weights is computed during the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from effasr.distributed.averager import LocalUpdates, add_flat, check_warmup
from effasr.distributed.process_group import DistributedContext


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayedConfig:
    """Start of the averages.

    Attributes:
        warmup_steps: Steps before the first average, in which gradients are exchanged as with ddp.
    """

    warmup_steps: int = 1000

    def __post_init__(self) -> None:
        check_warmup(self.warmup_steps)


class DelayedAveraging(LocalUpdates):
    """Each rank adds its own update of a step to the mean of the weights before that step.

    ``x_r(k+1) = mean(x(k)) + update_r(x_r(k))``, "delay-by-one" of Zhang et al. (2020, arXiv
    2002.01119): the all-reduce runs during forward and backward, so ranks wait only for one that
    is more than a step late. It needs a copy of the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        statistics: Sequence[Tensor],
        context: DistributedContext,
        warmup_steps: int,
    ) -> None:
        super().__init__(model, optimizer, statistics, context, warmup_steps)
        # A separate group, because others are used during the all-reduce.
        self._group = context.new_group()
        self._pending: tuple[Tensor, Tensor, dist.Work] | None = None

    @torch.no_grad()
    def before(self, step: int) -> None:
        # Weights are equal until the first local step.
        if step <= self._warmup_steps:
            return
        sent = torch.cat([tensor.reshape(-1) for tensor in self._tensors])
        mean = sent / self._context.size
        work = dist.all_reduce(mean, group=self._group, async_op=True)
        assert work is not None
        self._pending = sent, mean, work

    def after(self, step: int) -> None:
        """Add the mean of the weights before the step, less this rank's weights before it."""
        if self._pending is None:
            return
        (sent, mean, work), self._pending = self._pending, None
        work.wait()
        add_flat(self._tensors, mean.sub_(sent))
