"""Kernels of `bias_activation_dropout`."""

from __future__ import annotations

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from effasr_kernels.shared.philox import keep_elements

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY_AT_0 = tl.constexpr(0.3989422804014327)


@triton.jit
def _load(tensor, row, c, stride, mask):
    """Load a tile in float32, with zeros outside the mask."""
    at = row.to(tl.int64)[:, None] * stride + c[None, :]
    return tl.load(tensor + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_bias(bias, c, channels, BLOCK_C: tl.constexpr):
    """Load the bias in float32, (1, BLOCK_C); zeros for None."""
    found = tl.zeros((1, BLOCK_C), tl.float32)
    if bias is not None:
        found += tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    return found


@triton.jit(do_not_specialize=["sequences", "rows", "offset"])
def activate(
    x,
    bias,
    seed,
    cu_seqlens,
    y,
    sequences,
    rows,
    offset,
    channels,
    x_stride,
    scale,
    probability,
    ACTIVATION: tl.constexpr,
    DROPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute a tile of y; program (block of rows, block of columns).

    Args:
        x: (rows, C).
        bias: (C,), or None.
        seed: int64 (1,), or None without dropout.
        cu_seqlens: int32 (N + 1,).
        y: (rows, C), written.
        sequences: N.
        rows: Rows of x and y, including the tail.
        offset: See `keep_elements`.
        channels: C.
        x_stride: Row stride of ``x`` in elements.
        scale: Factor of kept elements.
        probability: Probability to drop an element.
        ACTIVATION: ``silu``, ``relu`` or ``gelu``.
        DROPS: Whether to drop elements.
        ROWS: Rows of a tile.
        BLOCK_C: Columns of a tile.
    """
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK_C
    c = column + tl.arange(0, BLOCK_C)
    inside = c < channels
    mask = (row < tl.load(cu_seqlens + sequences))[:, None] & inside[None, :]
    value = _load(x, row, c, x_stride, mask) + _load_bias(bias, c, channels, BLOCK_C)
    if ACTIVATION == "silu":
        value *= tl.sigmoid(value)
    elif ACTIVATION == "relu":
        value = tl.where(value < 0.0, 0.0, value)  # the maximum would be 0 for NaN
    else:
        value *= 0.5 * (1.0 + tl.erf(value * _SQRT_HALF))
    if DROPS:
        keep = keep_elements(tl.load(seed), first, column, offset, probability, ROWS, BLOCK_C)
        value = tl.where(keep, value * scale, 0.0)
    value = tl.where(mask, value, 0.0)
    at = row.to(tl.int64)[:, None] * channels + c[None, :]
    whole = (row < rows)[:, None] & inside[None, :]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize=["sequences", "rows", "offset"])
def activate_backward(
    dy,
    x,
    bias,
    seed,
    cu_seqlens,
    dx,
    partials,
    sequences,
    rows,
    offset,
    channels,
    x_stride,
    scale,
    probability,
    ACTIVATION: tl.constexpr,
    DROPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write the gradient of x, and partial sums of it for the bias.

    Program (i, block of columns) of n along the rows takes rows from ROWS i, from ROWS (i + n) and
    so on, and adds them in this order.

    Args:
        dy: (rows, C).
        x: (rows, C).
        bias: (C,), or None.
        seed: int64 (1,), or None without dropout.
        cu_seqlens: int32 (N + 1,).
        dx: (rows, C), written.
        partials: float32 (n, C), written; None without a bias.
        sequences: N.
        rows: Rows of dy, x and dx, including the tail.
        offset: See `keep_elements`.
        channels: C.
        x_stride: Row stride of ``x`` in elements.
        scale: Factor of kept elements.
        probability: Probability to drop an element.
        ACTIVATION: ``silu``, ``relu`` or ``gelu``.
        DROPS: Whether elements were dropped.
        ROWS: Rows of a tile.
        BLOCK_C: Columns of a tile.
    """
    column = tl.program_id(1) * BLOCK_C
    c = column + tl.arange(0, BLOCK_C)
    inside = c < channels
    count = tl.load(cu_seqlens + sequences)
    b = _load_bias(bias, c, channels, BLOCK_C)
    total = tl.zeros((1, BLOCK_C), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & inside[None, :]
        gradient = _load(dy, row, c, channels, mask)
        if DROPS:
            keep = keep_elements(tl.load(seed), first, column, offset, probability, ROWS, BLOCK_C)
            gradient = tl.where(keep, gradient * scale, 0.0)
        value = _load(x, row, c, x_stride, mask) + b
        if ACTIVATION == "silu":
            share = tl.sigmoid(value)
            slope = share * (1.0 + value * (1.0 - share))
        elif ACTIVATION == "relu":
            slope = tl.where(value <= 0.0, 0.0, 1.0)  # 1 for NaN, as in PyTorch
        else:
            slope = 0.5 * (1.0 + tl.erf(value * _SQRT_HALF))
            slope += value * tl.exp(-0.5 * value * value) * _DENSITY_AT_0
        gradient = tl.where(mask, gradient * slope, 0.0)
        at = row.to(tl.int64)[:, None] * channels + c[None, :]
        whole = (row < rows)[:, None] & inside[None, :]
        tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=whole)
        total += tl.sum(gradient, 0, keep_dims=True)
    if partials is not None:
        to = partials + tl.program_id(0).to(tl.int64) * channels + c[None, :]
        tl.store(to, total, mask=inside[None, :])
