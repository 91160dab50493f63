"""`depthwise_conv` in Triton.

Loading 2C values and storing C for every frame takes only slightly longer than the arithmetic.
Threads therefore iterate over the rows and keep the last K inputs in registers. Each input is
loaded and gated once by a group of threads; the adjacent group repeats that only at the border.
Gating again for every tap would cost K exponentials and divisions for each value, which take longer
than a second pass over memory.
"""

# ruff: noqa: RUF005 (Triton cannot unpack a tuple into another)
# pyright: reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.depthwise_conv import ConvArguments
from effasr_kernels.runtime.counters import program_counters
from effasr_kernels.runtime.dispatch import Gradients, Tensors
from effasr_kernels.runtime.launch import ceil_div, launch, unit_stride
from effasr_kernels.runtime.tiles import empty_tile_table, read_tile, tile_programs, tile_table
from effasr_kernels.shared.last_program import is_last_program
from effasr_kernels.shared.partial_sums import keep_sums, summed, summed_parts

_MOST_TAPS = 32
_GROUPS, _STEP = 4, 4
_BLOCK = 128
_MERGED = 16
"""Statistics of tiles that a thread loads at a time. More would cost the convolution threads."""


def unsupported_reason(a: ConvArguments) -> str | None:
    if a.weight.shape[1] > _MOST_TAPS:
        return f"more than {_MOST_TAPS} taps do not fit in registers"
    return None


def forward(a: ConvArguments) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor]]:
    x, layout = unit_stride(a.x), a.layout
    tiles = tile_table(layout, _BLOCK)
    channels, width = a.weight.shape
    config, options = _configuration(width, channels)
    blocks_c = ceil_div(channels, config["BLOCK_C"])
    programs = tile_programs(layout, _BLOCK, listed=True)
    y = x.new_empty(layout.rows, channels)
    # Without a row nothing is launched.
    make = x.new_empty if programs else x.new_zeros
    size = channels if a.statistics else 0
    mean, variance = (make(size, dtype=torch.float32) for _ in range(2))
    merged = _MERGED * 32 * options["num_warps"] // config["BLOCK_C"]
    partials: tuple[Tensor | None, ...] = (None,) * 6
    if a.statistics:
        partials = (
            _wide(x, blocks_c, programs),
            *(_wide(x, programs, channels), _wide(x, programs, channels)),
            *(mean, variance, program_counters(x, blocks_c * (1 + ceil_div(programs, merged)))),
        )
    launch(
        convolve,
        (programs, blocks_c),
        *(x, a.weight.contiguous(), None if a.bias is None else a.bias.contiguous(), y, *partials),
        *(tiles, layout.num_sequences, x.stride(0), channels),
        **options,
        **config,
        maxnreg=_most_registers(x.dtype, width, options["num_warps"]),
        TAPS=width,
        LEFT=width - 1 if a.causal else width // 2,
        GATED=a.gated,
        STATISTICS=a.statistics,
        MERGED=merged,
        BLOCK=_BLOCK,
    )
    return (y, mean, variance), (tiles,)


def saved_like(a: ConvArguments) -> tuple[Tensor]:
    # A layout in compiled code keeps no table for the backward.
    return (empty_tile_table(a.layout, _BLOCK),)


def backward(a: ConvArguments, grads: Tensors, results: Tensors, saved: Tensors) -> Gradients:
    x, layout = unit_stride(a.x), a.layout
    channels, width = a.weight.shape
    config, options = _configuration(width, channels, most=2)
    blocks_c = ceil_div(channels, config["BLOCK_C"])
    programs = tile_programs(layout, _BLOCK, blocks_c)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    # The gradient of the weight in its order, then of the bias.
    partials = _wide(x, programs, width if a.bias is None else width + 1, channels)
    of_dx = _wide(x, programs, dx.shape[1])
    launch(
        convolve_backward,
        (programs, blocks_c),
        *(grads[0], x, a.weight.contiguous(), dx, partials, of_dx),
        *(saved[0], layout.num_sequences, x.stride(0), channels),
        **options,
        **config,
        TAPS=width,
        LEFT=width - 1 if a.causal else width // 2,
        GATED=a.gated,
        BIASED=a.bias is not None,
        BLOCK=_BLOCK,
    )
    keep_sums(dx, of_dx)
    if a.bias is None:
        dweight, dbias = summed(partials, a.weight.dtype), None
    else:
        dweight, dbias = summed_parts(partials, a.weight.dtype, a.bias.dtype)
    return {"x": dx, "weight": dweight.view(channels, width), "bias": dbias}


def _configuration(
    taps: int, channels: int, most: int = 4
) -> tuple[dict[str, int], dict[str, int]]:
    """Return constants and launch options, with as many channels per thread as registers allow."""
    # At most 2 in the backward: with 4, two programs fit a multiprocessor, and an H200 takes 1.25
    # times as long.
    per_thread = min(most, 4 if taps <= 11 else 2 if taps <= 17 else 1)
    # The largest of the block sizes with the fewest surplus channels.
    blocks = (128, 64, 32) if min(per_thread, most - 1) > 1 else (64, 32)
    block = min(blocks, key=lambda size: ceil_div(channels, size) * size)
    warps = _GROUPS * block // (32 * per_thread)
    return {"BLOCK_C": block, "GROUPS": _GROUPS, "STEP": _STEP}, {"num_warps": warps}


def _most_registers(dtype: torch.dtype, taps: int, warps: int) -> int | None:
    """Return the most registers of a thread in the forward; None lets the compiler choose."""
    # A multiprocessor then runs four programs of four warps. In float32 and with more taps, the
    # compiler would spill.
    return 128 if dtype != torch.float32 and taps <= 9 and warps == 4 else None


def _wide(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


@triton.jit(do_not_specialize=["sequences"])
def convolve(
    x,  # (rows, C), or (rows, 2C) if GATED
    weight,  # (C, TAPS), contiguous
    bias,  # (C,), or None
    y,  # (rows, C), written
    counts,  # float32 (blocks of channels, tiles): rows; like the next, written if STATISTICS
    means,  # float32 (tiles, C), mean of the rows of each tile
    squares,  # float32 (tiles, C), sums of squared deviations from the mean
    mean,  # float32 (C,), 0 if all counts are 0
    variance,  # float32 (C,), biased, 0 if all counts are 0
    counters,  # int32 (blocks of channels, 1 + groups of MERGED tiles); see `is_last_program`
    tiles,  # int32 (1 + tiles, 4); see `effasr_kernels.runtime.tiles.tile_table`
    sequences,  # N
    x_stride,
    channels,  # C
    TAPS: tl.constexpr,  # K
    LEFT: tl.constexpr,  # P, number of taps before the frame
    GATED: tl.constexpr,  # whether to convolve ``a * sigmoid(b)`` of the halves a and b of x
    STATISTICS: tl.constexpr,  # whether to compute statistics
    MERGED: tl.constexpr,  # tiles of statistics that are loaded at a time
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUPS: tl.constexpr,  # number of rows computed in parallel
    STEP: tl.constexpr,  # number of rows that a thread loads at a time
):
    """Write one tile of y, and the statistics of all; program (tile, block of channels)."""
    # Statistics exclude the tail. Of every MERGED tiles with rows, the last program merges the
    # statistics, and the last of these programs those of all: two levels, so that no program reads
    # the tiles of a long batch one after the other.
    tile, live = tl.program_id(0), tl.load(tiles)
    if tile >= live:
        return
    sequence, first, length, start = read_tile(tiles, tile, BLOCK)
    real = tl.where(sequence < sequences, length, 0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    x += (first + start) * x_stride
    y += (first + start) * channels
    count, tile_mean, square = _convolve_tile(
        x, weight, bias, y, c, start, length, real, x_stride, channels,
        TAPS, LEFT, GATED, STATISTICS, BLOCK, BLOCK_C, GROUPS, STEP,
    )  # fmt: skip
    if STATISTICS:
        # Each block of channels has separate counts, so that its programs have written all that
        # the last of them reads.
        counts += tl.program_id(1) * live
        partial = tile.to(tl.int64) * channels + c
        tl.store(counts + tile, count)
        tl.store(means + partial, tile_mean, mask=c < channels)
        tl.store(squares + partial, square, mask=c < channels)
        groups, group = tl.cdiv(live, MERGED), tile // MERGED
        counters += tl.program_id(1) * (1 + groups)
        begin = group * MERGED
        end = tl.minimum(begin + MERGED, live)
        if is_last_program(counters, 1 + group, end - begin):
            at = counts, means, squares
            count, tile_mean, square = _merge(*at, c, begin, end, 1, channels, MERGED, BLOCK_C)
            # In the place of the first of them, which no other program reads.
            first_of_group = begin.to(tl.int64) * channels + c
            tl.debug_barrier()
            tl.store(counts + begin, count)
            tl.store(means + first_of_group, tile_mean, mask=c < channels)
            tl.store(squares + first_of_group, square, mask=c < channels)
            if is_last_program(counters, 0, groups):
                count, tile_mean, square = _merge(
                    *at, c, 0, live, MERGED, channels, MERGED, BLOCK_C
                )
                tl.store(mean + c, tile_mean, mask=c < channels)
                tl.store(variance + c, square / tl.maximum(count, 1.0), mask=c < channels)


@triton.jit
def _convolve_tile(
    x, weight, bias, y, c, start, length, real, x_stride, channels,
    TAPS: tl.constexpr, LEFT: tl.constexpr, GATED: tl.constexpr, STATISTICS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the channels c of a tile of y; x and y begin at the first row of the tile."""
    # Each of the GROUPS of threads iterates over consecutive rows with the last TAPS - 1 inputs in
    # registers, so that every input is loaded and gated about once instead of TAPS times. `real` is
    # `length`, but 0 in the tail. Returns number, means and sums of squared deviations of the real
    # rows; zeros unless STATISTICS.
    inside = c < channels
    size, each, group = span(length, start, BLOCK, GROUPS, STEP)
    # Taps and bias are masked in the tail, so that its rows become zero.
    is_real = inside & (real > 0)
    w = load_taps(weight, c, is_real, group, TAPS)
    offset = tl.zeros((GROUPS, BLOCK_C), dtype=tl.float32)
    if bias is not None:
        offset += tl.load(bias + c, mask=is_real, other=0.0).to(tl.float32)
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
            step_row = i + step
            result = total.to(y.dtype.element_ty)
            tl.store(y + step_row * channels, result, mask=inside & (group + step_row < size))
            if STATISTICS:
                # Welford's update with the rounded values, because those will be normalized.
                stored = result.to(tl.float32)
                deviation = tl.where(row + step_row < real, stored - mean, 0.0)
                mean += deviation * (1.0 / (step_row + 1))
                square += deviation * (stored - mean)
    count = 0.0
    mean_of_tile = tl.zeros((1, BLOCK_C), tl.float32)
    if STATISTICS:
        number = tl.minimum(tl.maximum(tl.minimum(real - start, BLOCK) - group, 0), each)
        number = number.to(tl.float32)
        count = tl.sum(number)
        mean_of_tile = tl.sum(number * mean, axis=0, keep_dims=True) / tl.maximum(count, 1.0)
        square += number * (mean - mean_of_tile) * (mean - mean_of_tile)
    return count, mean_of_tile, tl.sum(square, axis=0, keep_dims=True)


@triton.jit
def _merge(
    counts, means, squares, c, begin, end, step: tl.constexpr, channels,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Merge those of every step-th tile in two passes, by the formula of Chan et al."""
    index = tl.arange(0, BLOCK)[:, None]
    number = tl.zeros((BLOCK, 1), dtype=tl.float32)
    weighted = tl.zeros((BLOCK, BLOCK_C), dtype=tl.float32)
    for first in range(begin, end, BLOCK * step):
        count, offset, mask = _tiles_from(first, step * index, counts, c, end, channels)
        number += count
        weighted += count * tl.load(means + offset, mask=mask, other=0.0, cache_modifier=".cg")
    rows = tl.sum(number)
    overall_mean = tl.sum(weighted, axis=0, keep_dims=True) / tl.maximum(rows, 1.0)
    total = tl.zeros((BLOCK, BLOCK_C), dtype=tl.float32)
    for first in range(begin, end, BLOCK * step):
        count, offset, mask = _tiles_from(first, step * index, counts, c, end, channels)
        deviation = (
            tl.load(means + offset, mask=mask, other=0.0, cache_modifier=".cg") - overall_mean
        )
        square = tl.load(squares + offset, mask=mask, other=0.0, cache_modifier=".cg")
        total += square + count * deviation * deviation
    return rows, overall_mean, tl.sum(total, axis=0, keep_dims=True)


@triton.jit
def _tiles_from(begin, index, counts, c, tiles, channels):
    """Return the counts of tiles, 0 past the last, and where channels c of their statistics are."""
    tile = begin + index
    count = tl.load(counts + tile, mask=tile < tiles, other=0.0, cache_modifier=".cg")
    return count, tile.to(tl.int64) * channels + c, (tile < tiles) & (c < channels)


@triton.jit(do_not_specialize=["sequences"])
def convolve_backward(
    dy,  # (rows, C)
    x,  # (rows, C), or (rows, 2C) if GATED
    weight,  # (C, TAPS), contiguous
    dx,  # the shape of `x`, contiguous, written
    partials,  # float32 (programs, C TAPS [+ C]), written: sums for weight, then bias if BIASED
    of_dx,  # float32 (programs, C), or (programs, 2C) if GATED, written: sums of the rows of `dx`
    tiles,  # int32 (1 + tiles, 4); see `effasr_kernels.runtime.tiles.tile_table`
    sequences,  # N
    x_stride,
    channels,  # C
    TAPS: tl.constexpr,  # K
    LEFT: tl.constexpr,  # P, number of taps before the frame
    GATED: tl.constexpr,  # whether the second half of the channels of `x` gates the first half
    BIASED: tl.constexpr,  # whether there is a bias
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUPS: tl.constexpr,  # number of rows computed in parallel
    STEP: tl.constexpr,  # number of rows that a thread loads at a time
):
    """Write tiles of dx and their partial sums: for the taps, the bias, and of dx itself."""
    # With u the gated input, du_s is the sum over k of w_k dy_{s - k + P}, and dw_k the sum over s
    # of u_s dy_{s - k + P}. Both use the same window of dy, kept in registers as in the forward.
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    partials += tl.program_id(0).to(tl.int64) * ((TAPS + 1 if BIASED else TAPS) * channels)
    dx_stride = 2 * channels if GATED else channels
    of_dx += tl.program_id(0).to(tl.int64) * dx_stride
    # Of the taps, of the bias, of dx and of its second half.
    dw = ()
    for _ in tl.static_range(TAPS + 3):
        dw = dw + (tl.zeros((GROUPS, BLOCK_C), dtype=tl.float32),)
    if tl.program_id(0) >= tl.load(tiles):
        # Zeros need no exchange between threads.
        _store_sums(partials, of_dx, dw, channels, TAPS, BIASED, GATED, BLOCK_C)
        return
    for tile in range(tl.program_id(0), tl.load(tiles), tl.num_programs(0)):
        sequence, first, length, start = read_tile(tiles, tile, BLOCK)
        real = tl.where(sequence < sequences, length, 0)
        first += start
        dw = _convolve_tile_backward(
            dy + first * channels, x + first * x_stride, weight, dx + first * dx_stride, dw,
            c, start, length, real, x_stride, dx_stride, channels,
            TAPS, LEFT, GATED, BLOCK, GROUPS, STEP,
        )  # fmt: skip
    _store_sums(partials, of_dx, dw, channels, TAPS, BIASED, GATED, BLOCK_C)


@triton.jit
def _convolve_tile_backward(
    dy, x, weight, dx, dw, c, start, length, real, x_stride, dx_stride, channels,
    TAPS: tl.constexpr, LEFT: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the channels c of a tile of dx, and return the sums dw with those of the tile added."""
    # The pointers are of the first row of the tile; `real` is as in `_convolve_tile`.
    inside = c < channels
    size, each, group = span(length, start, BLOCK, GROUPS, STEP)

    # The taps are masked in the tail, so that its rows become zero.
    w = load_taps(weight, c, inside & (real > 0), group, TAPS)
    dy += group * channels + c
    x += group * x_stride + c
    dx += group * dx_stride + c
    row = start + group
    window = ()
    for k in tl.static_range(TAPS - 1):
        ahead = k + LEFT + 1 - TAPS
        mask = inside & (row + ahead >= 0) & (row + ahead < real)
        fresh = tl.load(dy + ahead * channels, mask=mask, other=0.0)
        window = window + (fresh.to(tl.float32),)
    for i in range(0, each, STEP):
        news, values, gates = (), (), ()
        for step in tl.static_range(STEP):
            row_offset = i + step
            mask = inside & (row + (row_offset + LEFT) < real)
            news = news + (tl.load(dy + (row_offset + LEFT) * channels, mask=mask, other=0.0),)
            mask = inside & (row + row_offset < real)
            values = values + (tl.load(x + row_offset * x_stride, mask=mask, other=0.0),)
            if GATED:
                gates = gates + (
                    tl.load(x + row_offset * x_stride + channels, mask=mask, other=0.0),
                )
        for step in tl.static_range(STEP):
            row_offset = i + step
            window = window + (tl.cast(news[step], tl.float32),)
            du = tl.zeros_like(window[0])
            for k in tl.static_range(TAPS):
                du += w[k] * window[TAPS - 1 - k]
            within = inside & (group + row_offset < size)
            u = values[step].to(tl.float32)
            of_dx, of_dgate = dw[TAPS + 1], dw[TAPS + 2]
            if GATED:
                share = tl.sigmoid(gates[step].to(tl.float32))
                dgate = du * u * share * (1 - share)
                tl.store(
                    dx + row_offset * dx_stride + channels,
                    dgate.to(dx.dtype.element_ty),
                    mask=within,
                )
                of_dgate += dgate  # 0 past the end, as u is
                du *= share
                u *= share
            tl.store(dx + row_offset * dx_stride, du.to(dx.dtype.element_ty), mask=within)
            summed = ()
            for k in tl.static_range(TAPS):
                summed = summed + (dw[k] + u * window[TAPS - 1 - k],)
            of_dx += tl.where(within, du, 0.0)
            dw = summed + (dw[TAPS] + window[TAPS - 1 - LEFT], of_dx, of_dgate)
            window = window[1:]
    return dw


@triton.jit
def _store_sums(
    partials, of_dx, dw, channels, TAPS: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Store the sums over groups of the gradients of TAPS taps, of the bias, and of dx."""
    # Those of the taps are joined to one tensor (BLOCK_C, a power of two), so that adjacent threads
    # store adjacent values of (C, TAPS).
    SIZE: tl.constexpr = triton.next_power_of_2(TAPS)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    joined = ()
    for k in tl.static_range(SIZE):
        joined = joined + (tl.sum(dw[k], 0) if k < TAPS else tl.zeros((BLOCK_C,), tl.float32),)
    # Each pass joins the first half of the taps with the second, so that the first dimension behind
    # the channels is the highest bit of the tap. There are at most 32.
    for step in tl.static_range(1, 6):
        if SIZE >> step:
            pairs = ()
            for k in tl.static_range(SIZE >> step):
                pairs = pairs + (tl.join(joined[k], joined[k + (SIZE >> step)]),)
            joined = pairs
    tap = tl.arange(0, SIZE)
    at = partials + c[:, None] * TAPS + tap[None, :]
    mask = (c < channels)[:, None] & (tap < TAPS)[None, :]
    tl.store(at, tl.reshape(joined[0], (BLOCK_C, SIZE)), mask=mask)
    if BIASED:
        tl.store(partials + channels * TAPS + c, tl.sum(dw[TAPS], 0), mask=c < channels)
    tl.store(of_dx + c, tl.sum(dw[TAPS + 1], 0), mask=c < channels)
    if GATED:
        tl.store(of_dx + channels + c, tl.sum(dw[TAPS + 2], 0), mask=c < channels)


@triton.jit
def span(length, start, BLOCK: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr):
    """Divide the rows of a tile evenly among GROUPS of threads."""
    # Returns the rows of the tile; the rows of each group, a multiple of STEP; and the offset of
    # each group's first row in the tile, (GROUPS, 1). Only the last tile of a sequence can be
    # incomplete, so surplus rows of a group are past the end of the sequence.
    size = tl.minimum(tl.maximum(length - start, 0), BLOCK)
    each = tl.cdiv(size, GROUPS * STEP) * STEP
    return size, each, tl.arange(0, GROUPS)[:, None] * each


@triton.jit
def load_taps(weight, c, inside, group, TAPS: tl.constexpr):
    """Load the taps of channels c from (C, TAPS), in float32, as one tensor for each tap."""
    # The tensors have the shape of the rows, so several threads load the same value. No exchange
    # between threads is needed then: every thread multiplies its own channels.
    taps = ()
    for k in tl.static_range(TAPS):
        tap = tl.load(weight + (c * TAPS + k + group * 0), mask=inside, other=0.0)
        taps = taps + (tap.to(tl.float32),)
    return taps


@triton.jit
def gate(x, mask, channels, GATED: tl.constexpr):
    """Load inputs in float32 and, if GATED, multiply by the sigmoid of the input C channels on."""
    a = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        a *= tl.sigmoid(tl.load(x + channels, mask=mask, other=0.0).to(tl.float32))
    return a
