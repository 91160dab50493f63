"""Kernels of `rms_norm`: one pass over the rows forward, and one backward."""

from __future__ import annotations

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl


@triton.jit
def _rows(tensor, row, c, stride, mask, VEC: tl.constexpr):
    """Load rows in float32, with zeros outside the mask; a thread takes VEC columns."""
    at = row.to(tl.int64)[:, None] * stride + tl.max_contiguous(c, VEC)[None, :]
    return tl.load(tensor + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _factor(weight, c, width, OFFSET: tl.constexpr):
    """Return OFFSET + w in float32, (1, BLOCK_W)."""
    w = tl.load(weight + c, mask=c < width, other=0.0).to(tl.float32)
    return (w + OFFSET)[None, :]


@triton.jit(do_not_specialize=["rows"])
def normalize(
    x,
    weight,
    y,
    rstds,
    rows,
    width,
    x_stride,
    eps,
    OFFSET: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Normalize ROWS rows.

    Args:
        x: (rows, W).
        weight: (W,).
        y: (rows, W), contiguous, written.
        rstds: float32 (rows,), inverse root mean squares, written.
        rows: Rows of x and y.
        width: W.
        x_stride: Row stride of ``x`` in elements.
        eps: Added to the mean square.
        OFFSET: Added to the weight; with 0 the normalized row is rounded to the dtype of x.
        VEC: See `_rows`.
        ROWS: Rows of a program.
        BLOCK_W: A power of two, at least W.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK_W)
    mask = (row < rows)[:, None] & (c < width)[None, :]
    value = _rows(x, row, c, x_stride, mask, VEC)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(value * value, 1) / width + eps)
    normal = value * rstd[:, None]
    if OFFSET == 0:
        normal = normal.to(x.dtype.element_ty).to(tl.float32)
    normal *= _factor(weight, c, width, OFFSET)
    at = row.to(tl.int64)[:, None] * width + tl.max_contiguous(c, VEC)[None, :]
    tl.store(y + at, normal.to(y.dtype.element_ty), mask=mask)
    tl.store(rstds + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def normalize_backward(
    dy,
    x,
    weight,
    rstds,
    dx,
    partials,
    rows,
    width,
    x_stride,
    OFFSET: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write the gradient of x, and partial sums of that of the weight.

    Program i of n takes rows from ROWS i, from ROWS (i + n) and so on, and adds them in this order.

    Args:
        dy: (rows, W), contiguous.
        x: (rows, W).
        weight: (W,).
        rstds: float32 (rows,).
        dx: (rows, W), contiguous, written.
        partials: float32 (n, W), written; None if the weight has no gradient.
        rows: Rows of dy, x and dx.
        width: W.
        x_stride: Row stride of ``x`` in elements.
        OFFSET: See `normalize`.
        VEC: See `_rows`.
        ROWS: Rows of a tile.
        BLOCK_W: A power of two, at least W.
    """
    c = tl.arange(0, BLOCK_W)
    factor = _factor(weight, c, width, OFFSET)
    # A thread adds what it holds; the rows of a tile are added once, at the end.
    total = tl.zeros((ROWS, BLOCK_W), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (c < width)[None, :]
        rstd = tl.load(rstds + row, mask=row < rows, other=0.0)[:, None]
        normal = _rows(x, row, c, x_stride, mask, VEC) * rstd
        gradient = _rows(dy, row, c, width, mask, VEC)
        if partials is not None:
            if OFFSET == 0:
                total += gradient * normal.to(x.dtype.element_ty).to(tl.float32)
            else:
                total += gradient * normal
        gradient *= factor
        along = tl.sum(gradient * normal, 1, keep_dims=True) / width
        gradient = (gradient - normal * along) * rstd
        at = row.to(tl.int64)[:, None] * width + tl.max_contiguous(c, VEC)[None, :]
        tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=mask)
    if partials is not None:
        to = partials + tl.program_id(0).to(tl.int64) * width + c
        tl.store(to, tl.sum(total, 0), mask=c < width)
