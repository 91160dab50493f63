"""Running statistics, as of batch norms, which gradients do not keep equal or finite."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Return the running statistics in a model: the buffers themselves, not copies."""
    return [
        buffer
        for module in model.modules()
        for name in ("running_mean", "running_var", "running_duration")
        if isinstance(buffer := getattr(module, name, None), Tensor)
    ]


@torch.no_grad()
def copies(statistics: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of statistics of one dtype, made in one launch."""
    return _split(torch.cat(list(statistics)), statistics) if statistics else []


@torch.no_grad()
def restore_unless(finite: Tensor, statistics: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """Restore the ``kept`` copies where ``finite`` (bool ()) is false; the host does not wait."""
    if not statistics:
        return
    # Four launches for all, and not one for each.
    chosen = torch.where(finite, torch.cat(list(statistics)), torch.cat(list(kept)))
    torch._foreach_copy_(list(statistics), _split(chosen, statistics))  # pyright: ignore[reportPrivateImportUsage]


def _split(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = whole.split([x.numel() for x in like])
    return [part.view_as(x) for part, x in zip(parts, like, strict=True)]
