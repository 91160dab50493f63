"""Backward kernel of `depthwise_conv`: one pass over the rows."""

from __future__ import annotations

# ruff: noqa: RUF005 (Triton cannot unpack a tuple into another)
# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from effasr_kernels.depthwise_conv._rows import load_taps, span
from effasr_kernels.runtime.tiles import find_tile


@triton.jit(do_not_specialize=["sequences", "rows"])
def convolve_backward(
    dy,
    x,
    weight,
    dx,
    partials,
    cu_seqlens,
    sequences,
    rows,
    x_stride,
    channels,
    TAPS: tl.constexpr,
    LEFT: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUPS: tl.constexpr,
    STEP: tl.constexpr,
):
    r"""Write one tile of dx and its partial sums of the gradients of the taps and the bias.

    With u the gated input, du_s is the sum over k of w_k dy_{s - k + P}, and dw_k the sum over s of
    u_s dy_{s - k + P}. Both use the same window of dy, kept in registers as in the forward.

    Args:
        dy: (rows, C).
        x: (rows, C), or (rows, 2C) if GATED.
        weight: (C, TAPS), contiguous.
        dx: The shape of ``x``, contiguous, written.
        partials: float32, (tiles, C TAPS + C) if BIASED, else (tiles, C TAPS), written: the sums of
            the tile for the weight in its order, then for the bias.
        cu_seqlens: int32 (N + 1,).
        sequences: N.
        rows: Rows of x, dx and dy.
        x_stride: Row stride of ``x`` in elements.
        channels: C.
        TAPS: K.
        LEFT: P, number of taps before the frame.
        GATED: Whether the second half of the channels of ``x`` gates the first half.
        BIASED: Whether there is a bias.
        BLOCK: Rows of a tile; a multiple of GROUPS * STEP.
        BLOCK_C: Channels of a program.
        GROUPS: Number of rows computed in parallel.
        STEP: Number of rows that a thread loads at a time.
    """
    tile = tl.program_id(0)
    sequence, first, length, start = find_tile(cu_seqlens, sequences, rows, tile, BLOCK)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    inside = c < channels
    partials += tile.to(tl.int64) * ((TAPS + 1 if BIASED else TAPS) * channels)
    dw = ()
    for _ in tl.static_range(TAPS + 1):
        dw = dw + (tl.zeros((GROUPS, BLOCK_C), dtype=tl.float32),)
    if start >= length:
        _store_sums(partials, dw, channels, TAPS, BIASED, BLOCK_C)
        return
    real = tl.where(sequence < sequences, length, 0)
    size, each, group = span(length, start, BLOCK, GROUPS, STEP)

    # The taps are masked in the tail, so that its rows become zero.
    w = load_taps(weight, c, inside & (sequence < sequences), group, TAPS)
    dx_stride = 2 * channels if GATED else channels
    dy += (first + start) * channels + group * channels + c
    x += (first + start) * x_stride + group * x_stride + c
    dx += (first + start) * dx_stride + group * dx_stride + c
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
            here = i + step
            mask = inside & (row + (here + LEFT) < real)
            news = news + (tl.load(dy + (here + LEFT) * channels, mask=mask, other=0.0),)
            mask = inside & (row + here < real)
            values = values + (tl.load(x + here * x_stride, mask=mask, other=0.0),)
            if GATED:
                gates = gates + (tl.load(x + here * x_stride + channels, mask=mask, other=0.0),)
        for step in tl.static_range(STEP):
            here = i + step
            window = window + (tl.cast(news[step], tl.float32),)
            du = tl.zeros((GROUPS, BLOCK_C), dtype=tl.float32)
            for k in tl.static_range(TAPS):
                du += w[k] * window[TAPS - 1 - k]
            within = inside & (group + here < size)
            u = values[step].to(tl.float32)
            if GATED:
                share = tl.sigmoid(gates[step].to(tl.float32))
                dgate = du * u * share * (1 - share)
                tl.store(
                    dx + here * dx_stride + channels, dgate.to(dx.dtype.element_ty), mask=within
                )
                du *= share
                u *= share
            tl.store(dx + here * dx_stride, du.to(dx.dtype.element_ty), mask=within)
            summed = ()
            for k in tl.static_range(TAPS):
                summed = summed + (dw[k] + u * window[TAPS - 1 - k],)
            dw = summed + (dw[TAPS] + window[TAPS - 1 - LEFT],)
            window = window[1:]
    _store_sums(partials, dw, channels, TAPS, BIASED, BLOCK_C)


@triton.jit
def _store_sums(
    partials, dw, channels, TAPS: tl.constexpr, BIASED: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Store the sums over groups of the gradients of TAPS taps and of the bias.

    Those of the taps are joined to one tensor (BLOCK_C, a power of two), so that adjacent threads
    store adjacent values of (C, TAPS).

    Args:
        partials: float32 (C TAPS + C,) or (C TAPS,), written.
        dw: TAPS + 1 of (GROUPS, BLOCK_C).
        channels: C.
        TAPS: K.
        BIASED: Whether to store the sum for the bias.
        BLOCK_C: Channels of a program.
    """
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
    place = partials + c[:, None] * TAPS + tap[None, :]
    mask = (c < channels)[:, None] & (tap < TAPS)[None, :]
    tl.store(place, tl.reshape(joined[0], (BLOCK_C, SIZE)), mask=mask)
    if BIASED:
        tl.store(partials + channels * TAPS + c, tl.sum(dw[TAPS], 0), mask=c < channels)
