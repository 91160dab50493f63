"""Kernels of `dropout_add_layer_norm`: one pass over the rows forward, and one backward."""

from __future__ import annotations

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from effasr_kernels.shared.philox import keep_elements


@triton.jit
def _columns(channels, VEC: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the columns of a tile and which of them exist, (BLOCK_C,).

    A thread takes VEC columns of every tensor, narrow or wide. Else the compiler would give it
    more of the narrow ones, and would exchange values between threads through shared memory.
    """
    c = tl.max_contiguous(tl.arange(0, BLOCK_C), VEC)
    return c, c < channels


@triton.jit
def _rows(tensor, row, c, stride, mask):
    """Load rows in float32, with zeros outside the mask."""
    at = row.to(tl.int64)[:, None] * stride + c[None, :]
    return tl.load(tensor + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _sum(
    residual, x, x_bias, row, c, inside, mask, residual_stride, x_stride, seed, first, scale,
    probability, offset, DROPS: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Return residual + scale * dropout(x + bias), rounded to the dtype of the residual, float32.

    It is zero outside the mask.
    """
    total = _rows(residual, row, c, residual_stride, mask)
    if x is not None:
        branch = _rows(x, row, c, x_stride, mask)
        if x_bias is not None:
            added = tl.load(x_bias + c, mask=inside, other=0.0).to(tl.float32)
            branch += tl.where(mask, added[None, :], 0.0)
        if DROPS:
            keep = keep_elements(tl.load(seed), first, 0, offset, probability, ROWS, BLOCK_C)
            branch = tl.where(keep, branch, 0.0)
        total += branch * scale
        total = total.to(residual.dtype.element_ty).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["sequences", "rows", "offset"])
def add_norm(
    residual,
    x,
    x_bias,
    weight,
    bias,
    seed,
    cu_seqlens,
    summed,
    normed,
    means,
    rstds,
    sequences,
    rows,
    offset,
    channels,
    residual_stride,
    x_stride,
    scale,
    probability,
    eps,
    DROPS: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Add and normalize ROWS rows.

    Args:
        residual: (rows, C).
        x: (rows, C), or None.
        x_bias: (C,), or None.
        weight: (C,), or None without a norm.
        bias: (C,), or None without a norm.
        seed: int64 (1,).
        cu_seqlens: int32 (N + 1,).
        summed: (rows, C), written; None if only the norm is wanted.
        normed: (rows, C), written; None without a norm.
        means: float32 (rows,), means of the rows, written; None without a norm.
        rstds: float32 (rows,), inverse standard deviations, written; None without a norm.
        sequences: N.
        rows: Rows of all tensors, including the tail.
        offset: See `keep_elements`.
        channels: C.
        residual_stride: Row stride of ``residual`` in elements.
        x_stride: Row stride of ``x`` in elements.
        scale: Factor of x, divided by the share of kept elements.
        probability: Probability to drop an element.
        eps: Added to the variance.
        DROPS: Whether to drop elements.
        VEC: See `_columns`.
        ROWS: Rows of a program.
        BLOCK_C: A power of two, at least C.
    """
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    c, inside = _columns(channels, VEC, BLOCK_C)
    real = row < tl.load(cu_seqlens + sequences)
    exists = row < rows
    mask = real[:, None] & inside[None, :]
    whole = exists[:, None] & inside[None, :]
    total = _sum(
        residual, x, x_bias, row, c, inside, mask, residual_stride, x_stride, seed, first, scale,
        probability, offset, DROPS, ROWS, BLOCK_C,
    )  # fmt: skip
    at = row.to(tl.int64)[:, None] * channels + c[None, :]
    if summed is not None:
        tl.store(summed + at, total.to(summed.dtype.element_ty), mask=whole)
    if normed is not None:
        mean = tl.sum(total, 1) / channels
        centred = tl.where(inside[None, :], total - mean[:, None], 0.0)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / channels + eps)
        w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
        y = centred * rstd[:, None] * w[None, :] + b[None, :]
        y = tl.where(real[:, None], y, 0.0)
        tl.store(normed + at, y.to(normed.dtype.element_ty), mask=whole)
        tl.store(means + row, mean, mask=exists)
        tl.store(rstds + row, rstd, mask=exists)


@triton.jit(do_not_specialize=["sequences", "rows", "offset"])
def add_norm_backward(
    dnormed,
    dsummed,
    summed,
    x,
    x_bias,
    weight,
    means,
    rstds,
    seed,
    cu_seqlens,
    dresidual,
    dx,
    partials,
    sequences,
    rows,
    offset,
    channels,
    summed_stride,
    x_stride,
    scale,
    probability,
    DROPS: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write gradients of the residual and the branch, and partial sums of those of the parameters.

    Program i of n takes rows from ROWS i, from ROWS (i + n) and so on, and adds their shares of the
    parameters' gradients in this order.

    Args:
        dnormed: (rows, C), or None without a norm.
        dsummed: (rows, C), or None if only the norm was wanted.
        summed: (rows, C): what was normalized if ``x`` is None, else the residual. None without a
            norm.
        x: (rows, C), to which the residual is added again, or None.
        x_bias: (C,), or None. It is read with ``x``; without, it only has a gradient.
        weight: (C,), or None without a norm.
        means: float32 (rows,), or None without a norm.
        rstds: float32 (rows,), or None without a norm.
        seed: int64 (1,).
        cu_seqlens: int32 (N + 1,).
        dresidual: (rows, C), written.
        dx: (rows, C), written, or None.
        partials: float32 (programs, P, C), written: of weight and bias if there is a norm, then of
            ``x_bias``; None if there is none of them.
        sequences: N.
        rows: Rows of all tensors, including the tail.
        offset: See `keep_elements`.
        channels: C.
        summed_stride: Row stride of ``summed`` in elements.
        x_stride: Row stride of ``x`` in elements.
        scale: Factor of x, divided by the share of kept elements.
        probability: Probability to drop an element.
        DROPS: Whether elements were dropped.
        VEC: See `_columns`.
        ROWS: Rows of a tile.
        BLOCK_C: A power of two, at least C.
    """
    c, inside = _columns(channels, VEC, BLOCK_C)
    count = tl.load(cu_seqlens + sequences)
    if dnormed is not None:
        w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)[None, :]
        dweight = tl.zeros((1, BLOCK_C), tl.float32)
        dbias = tl.zeros((1, BLOCK_C), tl.float32)
    if x_bias is not None:
        dadded = tl.zeros((1, BLOCK_C), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & inside[None, :]
        whole = (row < rows)[:, None] & inside[None, :]
        gradient = tl.zeros((ROWS, BLOCK_C), tl.float32)
        if dsummed is not None:
            gradient = _rows(dsummed, row, c, channels, mask)
        if dnormed is not None:
            total = _sum(
                summed, x, x_bias, row, c, inside, mask, summed_stride, x_stride, seed, first,
                scale, probability, offset, DROPS, ROWS, BLOCK_C,
            )  # fmt: skip
            mean = tl.load(means + row, mask=row < count, other=0.0)[:, None]
            rstd = tl.load(rstds + row, mask=row < count, other=0.0)[:, None]
            dy = _rows(dnormed, row, c, channels, mask)
            # Zero outside: without its mask a column past C would hold -mean.
            normal = tl.where(mask, (total - mean) * rstd, 0.0)
            dweight += tl.sum(dy * normal, 0, keep_dims=True)
            dbias += tl.sum(dy, 0, keep_dims=True)
            scaled = dy * w
            along = tl.sum(scaled * normal, 1, keep_dims=True) / channels
            shift = tl.sum(scaled, 1, keep_dims=True) / channels
            gradient += tl.where(mask, (scaled - normal * along - shift) * rstd, 0.0)
        at = row.to(tl.int64)[:, None] * channels + c[None, :]
        tl.store(dresidual + at, gradient.to(dresidual.dtype.element_ty), mask=whole)
        if dx is not None:
            if DROPS:
                keep = keep_elements(tl.load(seed), first, 0, offset, probability, ROWS, BLOCK_C)
                gradient = tl.where(keep, gradient, 0.0)
            gradient *= scale
            tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=whole)
            if x_bias is not None:
                dadded += tl.sum(gradient, 0, keep_dims=True)
    to = tl.program_id(0).to(tl.int64) * channels
    if dnormed is not None:
        to = partials + (to * (2 if x_bias is None else 3)) + c[None, :]
        tl.store(to, dweight, mask=inside[None, :])
        tl.store(to + channels, dbias, mask=inside[None, :])
        if x_bias is not None:
            tl.store(to + 2 * channels, dadded, mask=inside[None, :])
    elif x_bias is not None:
        tl.store(partials + to + c[None, :], dadded, mask=inside[None, :])
