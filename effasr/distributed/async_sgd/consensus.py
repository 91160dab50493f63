"""The distance of learners from their mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup  # type: ignore[attr-defined]


@torch.no_grad()
def consensus_distance(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> float:
    """Return the mean over learners of the squared distance from their mean, ``||x_i - mean||^2``.

    Below a critical value, learners train as one would (Kong et al. 2021, "Consensus Control for
    Decentralized Deep Learning").
    """
    learners = dist.get_world_size(group)
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    for tensor in tensors:
        mean = tensor.detach().clone()
        dist.all_reduce(mean, group=group)
        mean.div_(learners)
        total += torch.sub(tensor, mean).double().square().sum()
    dist.all_reduce(total, group=group)
    return total.item() / learners
