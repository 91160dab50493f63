"""Forward kernels of `depthwise_conv`: the convolution and the reduction of its statistics."""

from __future__ import annotations

# ruff: noqa: RUF005 (Triton cannot unpack a tuple into another)
# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from effasr_kernels.depthwise_conv._rows import gate, load_taps, span
from effasr_kernels.runtime.tiles import find_tile


@triton.jit(do_not_specialize=["sequences", "rows"])
def convolve(
    x,
    weight,
    bias,
    y,
    counts,
    means,
    squares,
    cu_seqlens,
    sequences,
    rows,
    x_stride,
    channels,
    TAPS: tl.constexpr,
    LEFT: tl.constexpr,
    GATED: tl.constexpr,
    STATISTICS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUPS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write one tile of y and the number, mean and squared deviations of its rows.

    Statistics exclude the tail. Each of the GROUPS of threads iterates over consecutive rows with
    the last TAPS - 1 inputs in registers, so that every input is loaded and gated about once
    instead of TAPS times.

    Args:
        x: (rows, C), or (rows, 2C) if GATED.
        weight: (C, TAPS), contiguous.
        bias: (C,), or None.
        y: (rows, C), written.
        counts: float32 (tiles,), number of rows of each tile, written if STATISTICS.
        means: float32 (tiles, C), mean of the rows of each tile, written if STATISTICS.
        squares: float32 (tiles, C), sums of squared deviations from the mean, written if
            STATISTICS.
        cu_seqlens: int32 (N + 1,).
        sequences: N.
        rows: Rows of x and y.
        x_stride: Row stride of ``x`` in elements.
        channels: C.
        TAPS: K.
        LEFT: P, number of taps before the frame.
        GATED: Whether to convolve ``a * sigmoid(b)`` of the halves a and b of x.
        STATISTICS: Whether to write counts, means and squares.
        BLOCK: Rows of a tile; a multiple of GROUPS * STEP.
        BLOCK_C: Channels of a program.
        GROUPS: Number of rows computed in parallel.
        STEP: Number of rows that a thread loads at a time.
    """
    tile = tl.program_id(0)
    sequence, first, length, start = find_tile(cu_seqlens, sequences, rows, tile, BLOCK)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    inside = c < channels
    partial = tile.to(tl.int64) * channels + c
    if start >= length:
        if STATISTICS:
            nothing = tl.zeros((1, BLOCK_C), tl.float32)
            tl.store(means + partial, nothing, mask=inside)
            tl.store(squares + partial, nothing, mask=inside)
            tl.store(counts + tile, 0.0, mask=tl.program_id(1) == 0)
        return
    real = tl.where(sequence < sequences, length, 0)
    size, each, group = span(length, start, BLOCK, GROUPS, STEP)

    # Taps and bias are masked in the tail, so that its rows become zero.
    known = inside & (sequence < sequences)
    w = load_taps(weight, c, known, group, TAPS)
    offset = tl.zeros((GROUPS, BLOCK_C), dtype=tl.float32)
    if bias is not None:
        offset += tl.load(bias + c, mask=known, other=0.0).to(tl.float32)
    x += (first + start) * x_stride + group * x_stride + c
    y += (first + start) * channels + group * channels + c
    row = start + group
    window = ()
    for k in tl.static_range(TAPS - 1):
        ahead = k - LEFT
        mask = inside & (row + ahead >= 0) & (row + ahead < real)
        window = window + (gate(x + ahead * x_stride, mask, channels, GATED),)
    mean = tl.zeros((GROUPS, BLOCK_C), dtype=tl.float32)
    square = tl.zeros((GROUPS, BLOCK_C), dtype=tl.float32)
    for i in range(0, each, STEP):
        fresh = ()
        for step in tl.static_range(STEP):
            ahead = i + step + TAPS - 1 - LEFT
            mask = inside & (row + ahead < real)
            fresh = fresh + (gate(x + ahead * x_stride, mask, channels, GATED),)
        for step in tl.static_range(STEP):
            window = window + (fresh[step],)
            total = offset
            for k in tl.static_range(TAPS):
                total += w[k] * window[k]
            window = window[1:]
            here = i + step
            result = total.to(y.dtype.element_ty)
            tl.store(y + here * channels, result, mask=inside & (group + here < size))
            if STATISTICS:
                # Welford's update with the rounded values, because those will be normalized.
                stored = result.to(tl.float32)
                away = tl.where(row + here < real, stored - mean, 0.0)
                mean += away * (1.0 / (here + 1))
                square += away * (stored - mean)
    if STATISTICS:
        number = tl.minimum(tl.maximum(tl.minimum(real - start, BLOCK) - group, 0), each)
        number = number.to(tl.float32)
        count = tl.sum(number)
        whole = tl.sum(number * mean, axis=0, keep_dims=True) / tl.maximum(count, 1.0)
        square += number * (mean - whole) * (mean - whole)
        tl.store(means + partial, whole, mask=inside)
        tl.store(squares + partial, tl.sum(square, axis=0, keep_dims=True), mask=inside)
        tl.store(counts + tile, count, mask=tl.program_id(1) == 0)


@triton.jit(do_not_specialize=["tiles"])
def merge(
    counts,
    means,
    squares,
    mean,
    variance,
    tiles,
    channels,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Merge the statistics of all tiles in two passes, by the formula of Chan et al.

    Args:
        counts: float32 (tiles,).
        means: float32 (tiles, C).
        squares: float32 (tiles, C).
        mean: float32 (C,), written; 0 if all counts are 0.
        variance: float32 (C,), biased, written; 0 if all counts are 0.
        tiles: Number of tiles.
        channels: C.
        BLOCK: Tiles loaded at a time.
        BLOCK_C: Channels of a program.
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    index = tl.arange(0, BLOCK)[:, None]
    number = tl.zeros((BLOCK, 1), dtype=tl.float32)
    weighted = tl.zeros((BLOCK, BLOCK_C), dtype=tl.float32)
    for begin in range(0, tiles, BLOCK):
        tile = begin + index
        mask = (tile < tiles) & (c < channels)
        count = tl.load(counts + tile, mask=tile < tiles, other=0.0)
        number += count
        place = tile.to(tl.int64) * channels + c
        weighted += count * tl.load(means + place, mask=mask, other=0.0)
    rows = tl.maximum(tl.sum(number), 1.0)
    whole = tl.sum(weighted, axis=0, keep_dims=True) / rows
    total = tl.zeros((BLOCK, BLOCK_C), dtype=tl.float32)
    for begin in range(0, tiles, BLOCK):
        tile = begin + index
        mask = (tile < tiles) & (c < channels)
        count = tl.load(counts + tile, mask=tile < tiles, other=0.0)
        place = tile.to(tl.int64) * channels + c
        away = tl.load(means + place, mask=mask, other=0.0) - whole
        total += tl.load(squares + place, mask=mask, other=0.0) + count * away * away
    tl.store(mean + c, whole, mask=c < channels)
    spread = tl.sum(total, axis=0, keep_dims=True) / rows
    tl.store(variance + c, spread, mask=c < channels)
