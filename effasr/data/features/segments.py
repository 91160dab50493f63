"""Sums and maxima over the rows of each packed sequence."""

import torch
from torch import Tensor

from effasr_kernels import PackedLayout


def segment_sum(values: Tensor, layout: PackedLayout) -> Tensor:
    """Add the rows (T, ...) of each sequence: (N, ...), zero for an empty one.

    The order of the additions is fixed, so two runs agree bitwise, and the device is never
    waited for.
    """
    # `unsafe` skips a check of the offsets that would read them back from the device.
    return torch.segment_reduce(
        values, "sum", offsets=layout.cu_seqlens, axis=0, unsafe=True, initial=0.0
    )


def segment_max(values: Tensor, layout: PackedLayout) -> Tensor:
    """Return the largest of the values (T,) of each sequence: (N,), -inf for an empty one."""
    result = values.new_full((layout.num_sequences + 1,), -torch.inf)
    return result.scatter_reduce(0, layout.sequence_ids(), values, "amax")[:-1]
