from torch import Tensor

from effasr_kernels.shared.ragged import widen
from effasr_kernels.shared.strided import (
    StridedTaps,
    by_pieces,
    first_rows,
    slot_table,
    unreal_rows,
)
from effasr_kernels.strided_depthwise import StridedArguments

_SLOTS = 4_096
"""Maximum number of slots computed at a time."""


def run(a: StridedArguments) -> Tensor:
    x = a.x
    taps, offset = widen(a.weight.T).reshape(3, 3, -1), widen(a.bias)
    first, remaining = slot_table(a.layout, a.lengths, 2)

    def compute(part: slice) -> Tensor:
        begins, part_remaining = first[part], remaining[part]
        real = widen(x[2 * part.start : 2 * part.stop])
        real = real.index_fill(0, unreal_rows(part_remaining, 2, 1), 0)
        real = real.view(-1, 2, x.shape[1] // 2, 2, x.shape[2])
        quarters = real.permute(1, 3, 0, 2, 4).contiguous()
        if a.relu:
            # In place, as autograd keeps this tensor for the convolution anyway.
            quarters = quarters.relu_()
        rows = first_rows(begins, 1), unreal_rows(part_remaining, 1, 2)
        return StridedTaps.apply(quarters, taps, offset, *rows).to(x.dtype)

    return by_pieces(a.layout.rows, _SLOTS, compute)
