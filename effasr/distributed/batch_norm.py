"""Running means and variances of batch norms, which gradients do not keep equal or finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Return the running means and variances in a model: the buffers themselves, not copies."""
    return [
        buffer
        for module in model.modules()
        for name in ("running_mean", "running_var")
        if isinstance(buffer := getattr(module, name, None), Tensor)
    ]


@torch.no_grad()
def restore_unless(finite: Tensor, statistics: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """Restore the ``kept`` copies where ``finite`` (bool ()) is false; the host does not wait."""
    for statistic, copy in zip(statistics, kept, strict=True):
        torch.where(finite, statistic, copy, out=statistic)
