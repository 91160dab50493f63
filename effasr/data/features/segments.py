"""Sums and maxima over the rows of each packed sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from effasr_kernels import PackedLayout


def segment_sum(values: Tensor, layout: PackedLayout) -> Tensor:
    """Add the rows of each sequence; the tail is left out.

    The order of the additions is fixed, so two runs agree bitwise, and the device is never
    waited for.

    Args:
        values: (T, ...), floating point.
        layout: N sequences in T rows.

    Returns:
        (N, ...), the dtype of ``values``; zero for an empty sequence.
    """
    # `unsafe` skips a check of the offsets that would read them back from the device.
    return torch.segment_reduce(
        values, "sum", offsets=layout.cu_seqlens, axis=0, unsafe=True, initial=0.0
    )


def segment_max(values: Tensor, layout: PackedLayout) -> Tensor:
    """Return the largest row of each sequence; the tail is left out.

    Args:
        values: (T,), floating point.
        layout: N sequences in T rows.

    Returns:
        (N,), the dtype of ``values``; -inf for an empty sequence.
    """
    result = values.new_full((layout.num_sequences + 1,), -torch.inf)
    return result.scatter_reduce(0, layout.sequence_ids(), values, "amax")[:-1]
