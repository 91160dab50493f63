"""Local SGD: every rank makes updates of its own, and now and then all take the mean of theirs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import group
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from effasr.distributed import batch_norm
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
        if self.warmup_steps < 0:
            raise ValueError(f"`warmup_steps` must be at least 0, but is {self.warmup_steps}.")


class LocalSGD:
    """The mean of what ranks have of their own, by PyTorch's `average_parameters`.

    PyTorch's `PeriodicModelAverager` would keep the time as well, but leaves out each parameter
    without a gradient in place, be it on one rank alone, and counts from the start of the process.

    Args:
        model: Not replicated.
        optimizer: Of its parameters.
        statistics: Of its batch norms.
        world: The ranks, more than one.
        config: When.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        statistics: Sequence[Tensor],
        world: World,
        config: LocalSGDConfig,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._statistics = statistics
        self._world = world
        self._config = config

    def is_local(self, step: int) -> bool:
        """Whether the gradients of a step, counted from 0, are not exchanged."""
        return step >= self._config.warmup_steps

    def after(self, step: int) -> None:
        """Average the weights and statistics after a step, if it is time to."""
        done = step + 1 - self._config.warmup_steps
        if done > 0 and done % self._config.period == 0:
            batch_norm.average(self._statistics, self._world)
            average_parameters(iter(self._model.parameters()), group.WORLD)  # type: ignore[arg-type]

    @torch.no_grad()
    def settle(self, others: Iterable[Tensor] = ()) -> None:
        """Give all ranks the mean of their weights and moments, as a checkpoint holds them.

        Args:
            others: More to average.
        """
        moments = [
            value
            for parameter in self._model.parameters()
            for value in self._optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor) and value.is_floating_point()
        ]
        for tensor in [*self._model.parameters(), *moments, *others]:
            self._world.sum(tensor.detach()).div_(self._world.size)
