"""A running average of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from effasr.checks import check


class WeightAverage:
    """Exponential moving average of the trained parameters, in their own precision.

    An update on k times the reference batch stands for k reference updates, and keeps ``decay **
    k`` of the old average (Busbridge et al. 2023). The decay after n reference updates is
    ``min(decay, (1 + n) / (10 + n))``, so that the first steps have little weight.
    """

    def __init__(self, model: nn.Module, decay: float, scale: float = 1.0) -> None:
        check(0 < decay < 1, "decay", "lie between 0 and 1", decay)
        check(scale > 0, "scale", "be positive", scale)
        self.decay = decay
        self.scale = scale
        self._parameters: dict[str, Tensor] = {
            name: p for name, p in model.named_parameters() if p.requires_grad
        }
        self.average = {name: p.detach().clone() for name, p in self._parameters.items()}

    @property
    def by_parameter(self) -> dict[Tensor, Tensor]:
        return {p: self.average[name] for name, p in self._parameters.items()}

    def share(self, step: int) -> float:
        """Return the share of the parameters after update number ``step``, counted from 0."""
        made = step * self.scale
        return 1 - min(self.decay, (1 + made) / (10 + made)) ** self.scale

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the parameters after update number ``step``, counted from 0."""
        averages, parameters = list(self.average.values()), list(self._parameters.values())
        torch._foreach_lerp_(averages, parameters, self.share(step))  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the averaged weights into the model in the block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            selected = parameter.clone()
            parameter.copy_(self.average[name])
            self.average[name].copy_(selected)
