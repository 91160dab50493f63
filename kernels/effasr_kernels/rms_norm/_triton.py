"""`rms_norm` in Triton.

For each bfloat16 element the forward moves 4 bytes and the backward 6: 12 and 18 us for 6,842 rows
of 2,048 channels at the 4.8 TB/s of an H200. Separate calls of PyTorch, as in transformers, move
36 forward alone: to float32, square, mean, product, back, and product with the weight.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, float32

from effasr_kernels.rms_norm import RMSNormArguments
from effasr_kernels.runtime.dispatch import Gradients, Tensors
from effasr_kernels.runtime.launch import ceil_div, launch, unit_stride
from effasr_kernels.shared.partial_sums import summed

_MOST_CHANNELS = 8_192
_TILE = 2_048
"""Elements of a tile of several rows: 16 for each thread of four warps."""
_PROGRAMS = 264 * 2_048
"""Programs of the backward, times channels: two on each of the 132 multiprocessors of an H200 for
2,048 channels. Each writes a partial sum, 4 bytes a channel: too many for the last program of the
launch to add alone (`effasr_kernels.shared.last_program`)."""
_MOST_PROGRAMS = 2_112


def unsupported_reason(a: RMSNormArguments) -> str | None:
    if a.x.shape[1] > _MOST_CHANNELS:
        return f"more than {_MOST_CHANNELS:,} channels do not fit in registers"
    return None


def forward(a: RMSNormArguments) -> tuple[tuple[Tensor], tuple[Tensor]]:
    """Saves the inverse root mean square of each row."""
    x, (rows, width) = unit_stride(a.x), a.x.shape
    y = x.new_empty(rows, width, dtype=a.result_dtype)
    (rstds,) = saved_like(a)
    options = _configuration(width, x, y)
    launch(
        normalize,
        (ceil_div(rows, options["ROWS"]),),
        *(x, a.weight.contiguous(), y, rstds, rows, width, x.stride(0), a.eps),
        **options,
        OFFSET=a.offset,
    )
    return (y,), (rstds,)


def saved_like(a: RMSNormArguments) -> tuple[Tensor]:
    return (a.x.new_empty(a.x.shape[0], dtype=float32),)


def backward(a: RMSNormArguments, grads: Tensors, results: Tensors, saved: Tensors) -> Gradients:
    x, (rows, width) = unit_stride(a.x), a.x.shape
    dx = x.new_empty(rows, width)
    options = _configuration(width, x, grads[0])
    max_programs = min(_MOST_PROGRAMS, _PROGRAMS // options["BLOCK_W"])
    programs = max(1, min(ceil_div(rows, options["ROWS"]), max_programs))
    partials = None if a.frozen else x.new_empty(programs, width, dtype=float32)
    launch(
        normalize_backward,
        (programs,),
        *(grads[0], x, a.weight.contiguous(), *saved, dx, partials, rows, width, x.stride(0)),
        **options,
        OFFSET=a.offset,
    )
    if partials is None:
        return {"x": dx}
    return {"x": dx, "weight": summed(partials, a.weight.dtype)}


def _configuration(width: int, *tensors: Tensor) -> dict[str, Any]:
    """Return constants and options with which a thread loads 16 bytes of the widest tensor."""
    vector = 16 // max(x.element_size() for x in tensors)
    block = max(16, 1 << (width - 1).bit_length())
    warps = min(16, max(4, 4 * block // _TILE))
    return {"ROWS": max(1, _TILE // block), "BLOCK_W": block, "VEC": vector, "num_warps": warps}


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
    x,  # (rows, W)
    weight,  # (W,)
    y,  # (rows, W), contiguous, written
    rstds,  # float32 (rows,), inverse root mean squares, written
    rows,  # rows of x and y
    width,  # W
    x_stride,
    eps,  # added to the mean square
    OFFSET: tl.constexpr,  # added to the weight; with 0 the normalized row is rounded to x's dtype
    VEC: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a program
    BLOCK_W: tl.constexpr,  # a power of two, at least W
):
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
    dy,  # (rows, W), contiguous
    x,  # (rows, W)
    weight,  # (W,)
    rstds,  # float32 (rows,)
    dx,  # (rows, W), contiguous, written
    partials,  # float32 (n, W), written; None if the weight has no gradient
    rows,  # rows of dy, x and dx
    width,  # W
    x_stride,
    OFFSET: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a tile
    BLOCK_W: tl.constexpr,  # a power of two, at least W
):
    """Write the gradient of x, and partial sums of the weight's gradient."""
    # Program i of n takes rows from ROWS i, from ROWS (i + n) and so on, and adds them in this
    # order.
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
