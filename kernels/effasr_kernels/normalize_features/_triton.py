"""`normalize_features` in Triton: three passes over the rows of a sequence in one kernel.

A program normalizes some channels of a sequence, whose rows are in the level-two cache after the
first pass: 67,584 rows of 80 bands are 22 MB, and 43 MB are read from and written to memory.
"""

import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.normalize_features import NormalizeArguments
from effasr_kernels.runtime.launch import ceil_div, launch

_BLOCK_R, _BLOCK_C = 128, 16
"""Rows and channels of a tile: 16 elements for each thread of 4 warps, in whole sectors."""

_TAIL_PROGRAMS = 64
"""Programs that set the tail to zero, which may be longer than every sequence."""


def run(a: NormalizeArguments) -> Tensor:
    layout, channels = a.layout, a.x.shape[1]
    y = a.x.new_empty(a.x.shape)
    programs = layout.num_sequences + _TAIL_PROGRAMS if layout.rows else 0
    launch(
        normalize_rows,
        (programs, ceil_div(channels, _BLOCK_C)),
        *(a.x.contiguous(), a.lengths.contiguous(), layout.cu_seqlens, y),
        *(layout.num_sequences, layout.rows, float(a.eps), float(a.log_guard)),
        LOG=a.log_guard > 0,
        TAIL_PROGRAMS=_TAIL_PROGRAMS,
        CHANNELS=channels,
        SLOT=a.rows_per_slot,
        BLOCK_R=_BLOCK_R,
        BLOCK_C=_BLOCK_C,
    )
    return y


@triton.jit
def _load(pointers, mask, guard, LOG: tl.constexpr):
    """Load a tile, or the logarithm of its elements and the guard; masked elements are zero."""
    x = tl.load(pointers, mask=mask, other=0.0)
    return tl.where(mask, tl.log(x.to(tl.float32) + guard), 0.0) if LOG else x


@triton.jit(do_not_specialize=["sequences", "slots"])
def normalize_rows(
    x,  # (s T, C), contiguous
    lengths,  # int32 or int64 (N,), contiguous
    cu_seqlens,  # int32 (N + 1,), of slots
    y,  # (s T, C), written
    sequences,  # N
    slots,  # T
    eps,  # added to the standard deviation
    guard,  # added before the logarithm
    LOG: tl.constexpr,  # whether to normalize the logarithm
    TAIL_PROGRAMS: tl.constexpr,  # programs for each block of channels that set the tail to zero
    CHANNELS: tl.constexpr,  # C
    SLOT: tl.constexpr,  # s
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Normalize a block of channels of a sequence, program (sequence, block); or zero the tail."""
    sequence = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_channels = (c < CHANNELS)[None, :]
    r = tl.arange(0, BLOCK_R)[:, None]
    zeros = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    if sequence < sequences:
        begin = tl.load(cu_seqlens + sequence)
        rows = (tl.load(cu_seqlens + sequence + 1) - begin) * SLOT
        real = tl.minimum(tl.load(lengths + sequence).to(tl.int32), rows)
        column = begin.to(tl.int64) * SLOT * CHANNELS + c[None, :]
        source, target = x + column, y + column
        total = zeros
        for first in range(0, real, BLOCK_R):
            row = first + r
            inside = (row < real) & in_channels
            total += _load(source + row * CHANNELS, inside, guard, LOG)
        # Rounded to nearest, so that the mean of one row is that row.
        mean = tl.div_rn(tl.sum(total, 0), tl.maximum(real, 1).to(tl.float32))
        squares = zeros
        for first in range(0, real, BLOCK_R):
            row = first + r
            inside = (row < real) & in_channels
            centred = _load(source + row * CHANNELS, inside, guard, LOG) - mean[None, :]
            squares += tl.where(inside, centred * centred, 0.0)
        variance = tl.div_rn(tl.sum(squares, 0), tl.maximum(real - 1, 1).to(tl.float32))
        scale = tl.sqrt_rn(variance) + eps
        for first in range(0, rows, BLOCK_R):
            row = first + r
            inside = (row < real) & in_channels
            value = _load(source + row * CHANNELS, inside, guard, LOG)
            value = tl.where(row < real, (value - mean[None, :]) / scale[None, :], 0.0)
            stored = value.to(y.dtype.element_ty)
            tl.store(target + row * CHANNELS, stored, mask=(row < rows) & in_channels)
    else:
        first = tl.load(cu_seqlens + sequences) * SLOT + (sequence - sequences) * BLOCK_R
        for begin in range(first, slots * SLOT, TAIL_PROGRAMS * BLOCK_R):
            row = begin + r
            index = row.to(tl.int64) * CHANNELS + c[None, :]
            tl.store(
                y + index, zeros.to(y.dtype.element_ty), mask=(row < slots * SLOT) & in_channels
            )
