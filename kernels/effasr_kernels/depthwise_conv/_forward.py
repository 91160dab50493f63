"""Forward kernel of `depthwise_conv`: the convolution and the reduction of its statistics."""

from __future__ import annotations

# ruff: noqa: RUF005 (Triton cannot unpack a tuple into another)
# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from effasr_kernels.depthwise_conv._rows import gate, load_taps, span
from effasr_kernels.runtime.tiles import find_tile
from effasr_kernels.shared.last_program import is_last_program


@triton.jit(do_not_specialize=["sequences", "rows"])
def convolve(
    x,
    weight,
    bias,
    y,
    counts,
    means,
    squares,
    mean,
    variance,
    counters,
    cu_seqlens,
    sequences,
    rows,
    x_stride,
    channels,
    TAPS: tl.constexpr,
    LEFT: tl.constexpr,
    GATED: tl.constexpr,
    STATISTICS: tl.constexpr,
    MERGED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUPS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write one tile of y, and the statistics of all; program (tile, block of channels).

    Statistics exclude the tail. The last program of a block of channels merges those of all tiles.

    Args:
        x: (rows, C), or (rows, 2C) if GATED.
        weight: (C, TAPS), contiguous.
        bias: (C,), or None.
        y: (rows, C), written.
        counts: float32 (blocks of channels, tiles), number of rows of each tile, written if
            STATISTICS; the following, too.
        means: float32 (tiles, C), mean of the rows of each tile.
        squares: float32 (tiles, C), sums of squared deviations from the mean.
        mean: float32 (C,), 0 if all counts are 0.
        variance: float32 (C,), biased, 0 if all counts are 0.
        counters: int32 (blocks of channels,); see `is_last_program`.
        cu_seqlens: int32 (N + 1,).
        sequences: N.
        rows: Rows of x and y.
        x_stride: Row stride of ``x`` in elements.
        channels: C.
        TAPS: K.
        LEFT: P, number of taps before the frame.
        GATED: Whether to convolve ``a * sigmoid(b)`` of the halves a and b of x.
        STATISTICS: Whether to compute statistics.
        MERGED: Tiles whose statistics are loaded at a time.
        BLOCK: Rows of a tile; a multiple of GROUPS * STEP.
        BLOCK_C: Channels of a program.
        GROUPS: Number of rows computed in parallel.
        STEP: Number of rows that a thread loads at a time.
    """
    tile = tl.program_id(0)
    sequence, first, length, start = find_tile(cu_seqlens, sequences, rows, tile, BLOCK)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    count = 0.0
    whole = tl.zeros((1, BLOCK_C), tl.float32)
    square = tl.zeros((1, BLOCK_C), tl.float32)
    if start < length:
        x += (first + start) * x_stride
        y += (first + start) * channels
        real = tl.where(sequence < sequences, length, 0)
        count, whole, square = _convolve_tile(
            x, weight, bias, y, c, start, length, real, x_stride, channels,
            TAPS, LEFT, GATED, STATISTICS, BLOCK, BLOCK_C, GROUPS, STEP,
        )  # fmt: skip
    if STATISTICS:
        tiles = tl.num_programs(0)
        # Each block of channels has counts of its own, so that its programs have written all that
        # the last of them reads.
        counts += tl.program_id(1) * tiles
        partial = tile.to(tl.int64) * channels + c
        tl.store(counts + tile, count)
        tl.store(means + partial, whole, mask=c < channels)
        tl.store(squares + partial, square, mask=c < channels)
        if is_last_program(counters, tl.program_id(1), tiles):
            _merge(counts, means, squares, mean, variance, c, tiles, channels, MERGED, BLOCK_C)


@triton.jit
def _convolve_tile(
    x, weight, bias, y, c, start, length, real, x_stride, channels,
    TAPS: tl.constexpr, LEFT: tl.constexpr, GATED: tl.constexpr, STATISTICS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the channels c of a tile of y.

    Each of the GROUPS of threads iterates over consecutive rows with the last TAPS - 1 inputs in
    registers, so that every input is loaded and gated about once instead of TAPS times.

    Args:
        x: Its first row is that of the tile; the others as in `convolve`, as far as they are there.
        weight: See `convolve`.
        bias: See `convolve`.
        y: Its first row is that of the tile.
        c: (1, BLOCK_C).
        start: First row of the tile within its sequence.
        length: Rows of the sequence, or of the tail.
        real: ``length``, but 0 for the tail.
        x_stride: See `convolve`; the following, too.
        channels: C.
        TAPS: K.
        LEFT: P.
        GATED: Whether x is gated.
        STATISTICS: Whether to compute statistics.
        BLOCK: Rows of a tile.
        BLOCK_C: Channels of a program.
        GROUPS: Number of rows computed in parallel.
        STEP: Number of rows that a thread loads at a time.

    Returns:
        Number, means and sums of squared deviations of the real rows; zeros unless STATISTICS.
    """
    inside = c < channels
    size, each, group = span(length, start, BLOCK, GROUPS, STEP)
    # Taps and bias are masked in the tail, so that its rows become zero.
    known = inside & (real > 0)
    w = load_taps(weight, c, known, group, TAPS)
    offset = tl.zeros((GROUPS, BLOCK_C), dtype=tl.float32)
    if bias is not None:
        offset += tl.load(bias + c, mask=known, other=0.0).to(tl.float32)
    x += group * x_stride + c
    y += group * channels + c
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
    count = 0.0
    whole = tl.zeros((1, BLOCK_C), tl.float32)
    if STATISTICS:
        number = tl.minimum(tl.maximum(tl.minimum(real - start, BLOCK) - group, 0), each)
        number = number.to(tl.float32)
        count = tl.sum(number)
        whole = tl.sum(number * mean, axis=0, keep_dims=True) / tl.maximum(count, 1.0)
        square += number * (mean - whole) * (mean - whole)
    return count, whole, tl.sum(square, axis=0, keep_dims=True)


@triton.jit
def _merge(
    counts, means, squares, mean, variance, c, tiles, channels,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Merge the statistics of all tiles in two passes, by the formula of Chan et al.

    Args:
        counts: float32 (tiles,).
        means: float32 (tiles, C).
        squares: float32 (tiles, C).
        mean: float32 (C,), written; 0 if all counts are 0.
        variance: float32 (C,), biased, written; 0 if all counts are 0.
        c: The channels, (1, BLOCK_C).
        tiles: Number of tiles.
        channels: C.
        BLOCK: Tiles loaded at a time.
        BLOCK_C: Channels of a program.
    """
    index = tl.arange(0, BLOCK)[:, None]
    number = tl.zeros((BLOCK, 1), dtype=tl.float32)
    weighted = tl.zeros((BLOCK, BLOCK_C), dtype=tl.float32)
    for begin in range(0, tiles, BLOCK):
        count, place, mask = _tiles_from(begin, index, counts, c, tiles, channels)
        number += count
        weighted += count * tl.load(means + place, mask=mask, other=0.0, cache_modifier=".cg")
    rows = tl.maximum(tl.sum(number), 1.0)
    whole = tl.sum(weighted, axis=0, keep_dims=True) / rows
    total = tl.zeros((BLOCK, BLOCK_C), dtype=tl.float32)
    for begin in range(0, tiles, BLOCK):
        count, place, mask = _tiles_from(begin, index, counts, c, tiles, channels)
        away = tl.load(means + place, mask=mask, other=0.0, cache_modifier=".cg") - whole
        square = tl.load(squares + place, mask=mask, other=0.0, cache_modifier=".cg")
        total += square + count * away * away
    tl.store(mean + c, whole, mask=c < channels)
    spread = tl.sum(total, axis=0, keep_dims=True) / rows
    tl.store(variance + c, spread, mask=c < channels)


@triton.jit
def _tiles_from(begin, index, counts, c, tiles, channels):
    """Return the counts of tiles, 0 past the last, and where channels c of their statistics are."""
    tile = begin + index
    count = tl.load(counts + tile, mask=tile < tiles, other=0.0, cache_modifier=".cg")
    return count, tile.to(tl.int64) * channels + c, (tile < tiles) & (c < channels)
