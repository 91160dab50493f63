import torch
from torch import Tensor

from effasr_kernels.normalize_features import NormalizeArguments
from effasr_kernels.shared.ragged import widen
from effasr_kernels.shared.slots import row_positions, rows_of


def run(a: NormalizeArguments) -> Tensor:
    lengths = a.lengths[:, None]
    real = row_positions(a.layout, a.rows_per_slot)[:, None] < rows_of(
        lengths, a.layout, a.rows_per_slot
    )
    x = widen(a.x).masked_fill(~real, 0.0)
    if a.log_guard:
        x.add_(a.log_guard).log_().masked_fill_(~real, 0.0)
    mean = _sums(x, a) / lengths.clamp(min=1)
    centred = x.sub_(rows_of(mean, a.layout, a.rows_per_slot)).masked_fill_(~real, 0.0)
    variance = _sums(centred.square(), a) / (lengths - 1).clamp(min=1)
    scale = rows_of(variance.sqrt(), a.layout, a.rows_per_slot).add_(a.eps)
    return centred.div_(scale).to(a.x.dtype)


def _sums(x: Tensor, a: NormalizeArguments) -> Tensor:
    """Add the rows of each sequence: (s T, C) to (N, C)."""
    slots = x.view(a.layout.rows, a.rows_per_slot, x.shape[1]).sum(1)
    # `unsafe` skips a check of the offsets that would read them back from the device.
    return torch.segment_reduce(
        slots, "sum", offsets=a.layout.cu_seqlens, axis=0, unsafe=True, initial=0.0
    )
