"""Delayed averaging: the mean of the weights travels while the next update is computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from effasr.distributed.averager import add_flat, check_warmup, mixed_tensors, settle
from effasr.distributed.process_group import World


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayedConfig:
    """When ranks begin to average.

    Attributes:
        warmup_steps: Steps before, in which gradients are exchanged as with ddp.
    """

    warmup_steps: int = 1000

    def __post_init__(self) -> None:
        check_warmup(self.warmup_steps)


class DelayedAveraging:
    """Each rank adds its own update of a step to the mean of the weights before that step.

    ``x_r(k+1) = mean(x(k)) + update_r(x_r(k))``, "delay-by-one" of Zhang et al. (2020, arXiv
    2002.01119): the mean is computed while forward and backward run, so nothing is waited for
    but a rank that is later than a whole step. Needs a copy of the weights.

    Args:
        model: Not replicated.
        optimizer: Of its parameters.
        statistics: Of its batch norms.
        world: The ranks, more than one.
        warmup_steps: Steps before, in which gradients are exchanged as with ddp.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        statistics: Sequence[Tensor],
        world: World,
        warmup_steps: int,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._statistics = statistics
        self._world = world
        self._warmup_steps = warmup_steps
        # Of its own, for others are used while it is under way.
        self._group = dist.new_group()
        self._sent: Tensor | None = None
        self._mean: Tensor | None = None
        self._work: dist.Work | None = None

    def is_local(self, step: int) -> bool:
        """Whether the gradients of a step, counted from 0, are not exchanged."""
        return step >= self._warmup_steps

    @torch.no_grad()
    def before(self, step: int) -> None:
        """Send the weights on their way to the mean."""
        # The first of them find all ranks alike.
        if step <= self._warmup_steps:
            return
        tensors = mixed_tensors(self._model, self._statistics)
        self._sent = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._mean = self._sent / self._world.size
        self._work = dist.all_reduce(self._mean, group=self._group, async_op=True)

    def after(self, step: int) -> None:
        """Take the mean of the weights before the step for those of this rank."""
        del step
        if self._work is None or self._mean is None or self._sent is None:
            return
        self._work.wait()
        add_flat(mixed_tensors(self._model, self._statistics), self._mean.sub_(self._sent))
        self._work = self._mean = self._sent = None

    def settle(self, others: Iterable[Tensor] = ()) -> None:
        """Give all ranks the mean of their weights and moments, as a checkpoint holds them.

        Args:
            others: More to average.
        """
        settle(self._model, self._optimizer, others, self._world)
