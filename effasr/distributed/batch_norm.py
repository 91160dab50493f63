"""Running means and variances of batch norms, which no gradient keeps equal or finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from effasr.distributed.process_group import World


def running_statistics(model: nn.Module) -> list[Tensor]:
    """The running means and variances in a model: themselves, not copies."""
    return [
        buffer
        for module in model.modules()
        for name in ("running_mean", "running_var")
        if isinstance(buffer := getattr(module, name, None), Tensor)
    ]


@torch.no_grad()
def average(statistics: Sequence[Tensor], world: World) -> None:
    """Replace statistics by their mean over all ranks, each of which saw other data."""
    for statistic in statistics:
        world.sum(statistic).div_(world.size)


@torch.no_grad()
def restore_unless(finite: Tensor, statistics: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """Put back the ``kept`` copies where ``finite`` (bool ()) is false; the host does not wait."""
    for statistic, copy in zip(statistics, kept, strict=True):
        torch.where(finite, statistic, copy, out=statistic)
