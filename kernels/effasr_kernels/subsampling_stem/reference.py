import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels.shared.ragged import widen
from effasr_kernels.shared.strided import (
    StridedTaps,
    by_pieces,
    first_rows,
    slot_table,
    unreal_rows,
)
from effasr_kernels.subsampling_stem import StemArguments

_SLOTS = 1_024
"""Maximum number of slots computed at a time."""


def run(a: StemArguments) -> Tensor:
    x, weight, bias, layout = a.x, a.weight, a.bias, a.layout
    slots = widen(x).view(layout.rows, a.rows_per_slot, x.shape[1])
    # Contiguous, because the product for the gradient of a transposed view would be slow.
    filters = widen(torch.cat([weight.T, bias[None]])).contiguous()
    taps, offset = widen(a.depthwise_weight.T).reshape(3, 3, -1), widen(a.depthwise_bias)
    first, remaining = slot_table(layout, a.lengths, a.rows_per_slot)

    def compute(part: slice) -> Tensor:
        begins, part_remaining = first[part], remaining[part]
        patches = _patches(slots[part], begins, part_remaining)
        activation = (patches.flatten(1).T @ filters).relu_()
        quarters = activation.view(*patches.shape[1:], weight.shape[0])
        quarter = a.rows_per_slot // 4
        rows = first_rows(begins, quarter), unreal_rows(part_remaining, quarter, 4)
        return StridedTaps.apply(quarters, taps, offset, *rows).to(x.dtype)

    return by_pieces(layout.rows, _SLOTS, compute)


def _patches(slots: Tensor, first: Tensor, remaining: Tensor) -> Tensor:
    """Return the factors of the weights and the bias of the first convolution at each place."""
    # All ten factors are zero in rows past the length, so that the result is zero there.
    rows_per_slot, bins = slots.shape[1:]
    x = slots.flatten(0, 1).index_fill(0, unreal_rows(remaining, rows_per_slot, 1), 0)
    even, odd = x.view(-1, 2, bins).unbind(1)
    half = rows_per_slot // 2
    unreal = unreal_rows(remaining, half, 2)
    # In result rows past the length, only this one of the three input rows can be within it.
    row_above = F.pad(odd, (0, 0, 1, 0))[:-1]
    row_above = row_above.index_fill_(0, first_rows(first, half), 0).index_fill_(0, unreal, 0)
    rows = F.pad(torch.stack([row_above, even, odd]), (1, 0)).unfold(2, 3, 2)
    rows = rows.view(3, -1, 2, bins // 4, 2, 3).permute(0, 5, 2, 4, 1, 3)
    patches = x.new_empty(10, *rows.shape[2:])
    patches[:9].view(rows.shape).copy_(rows)
    ones = x.new_ones(even.shape[0]).index_fill_(0, unreal, 0)
    patches[9] = ones.view(-1, 2).T[:, None, :, None]
    return patches
