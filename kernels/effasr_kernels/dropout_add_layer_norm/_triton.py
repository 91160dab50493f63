"""`dropout_add_layer_norm` in Triton.

For each element of a float32 residual stream and a bfloat16 branch, the forward moves 12 bytes
(reads 4 + 2, writes 4 + 2), the backward 16 (reads 4 + 2 of gradients and 4 of the sum, writes
4 + 2): 50 us for 8,448 rows of 1,024 channels at the 4.8 TB/s of an H200. The arithmetic, Philox
included, is less than 20 instructions an element, a third of that time.
"""

# pyright: reportGeneralTypeIssues=false
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.dropout_add_layer_norm import NormArguments
from effasr_kernels.runtime.dispatch import Gradients, Tensors
from effasr_kernels.runtime.launch import ceil_div, contiguous, launch, refusal, unit_stride
from effasr_kernels.shared.dropout import seed_tensor
from effasr_kernels.shared.partial_sums import summed, summed_parts
from effasr_kernels.shared.philox import keep_elements

_ROWS, _ROWS_WIDE = 4, 2
_WIDE = 2_048
"""From this number of channels on, fewer rows fit in registers."""
_MOST_CHANNELS = 4_096
_MOST_WARPS = 16
_PROGRAMS = 264 * 1_024
"""Programs of the backward, times channels: two programs of eight warps on each of the 132
multiprocessors of an H200 for 1,024 channels. Each writes a partial sum, 16 bytes a channel."""


def unsupported_reason(a: NormArguments) -> str | None:
    if a.residual.shape[1] > _MOST_CHANNELS:
        return f"more than {_MOST_CHANNELS:,} channels do not fit in registers"
    return None if a.x is None else refusal(a.x)


def forward(a: NormArguments) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    residual, x, (rows, channels) = unit_stride(a.residual), a.x, a.residual.shape
    x = None if x is None else unit_stride(x)
    none = residual.new_empty(0)
    summed = normed = None
    if a.prenorm and x is not None:
        summed = residual.new_empty(rows, channels)
    if a.weight is not None:
        normed = residual.new_empty(rows, channels, dtype=a.normed_dtype)
    means, rstds = saved_like(a)
    options = _configuration(channels, residual, x, normed)
    launch(
        add_norm,
        (ceil_div(rows, options["ROWS"]),),
        *(residual, x, *map(contiguous, (a.x_bias, a.weight, a.bias)), *_seed_and_layout(a)),
        *(summed, normed, *((None, None) if normed is None else (means, rstds))),
        *(a.layout.num_sequences, rows, a.offset, channels, residual.stride(0)),
        *(channels if x is None else x.stride(0), *_scale(a), a.eps),
        **options,
        DROPS=a.dropout > 0,
    )
    if a.prenorm and x is None:
        summed = a.residual
    return (none if normed is None else normed, none if summed is None else summed), (means, rstds)


def saved_like(a: NormArguments) -> tuple[Tensor, Tensor]:
    rows = 0 if a.weight is None else a.residual.shape[0]
    means, rstds = (a.residual.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return means, rstds


def backward(a: NormArguments, grads: Tensors, results: Tensors, saved: Tensors) -> Gradients:
    dsummed = grads[1] if a.prenorm else None
    dnormed = None if a.weight is None else grads[0]
    stream = results[1] if a.prenorm else a.residual
    summed = None if dnormed is None else unit_stride(stream)
    x = None if a.prenorm or a.x is None else unit_stride(a.x)
    rows, channels = stream.shape
    dresidual = stream.new_empty(rows, channels)
    dx = stream.new_empty(rows, channels, dtype=a.narrow_dtype) if a.has_branch else None
    options = _configuration(channels, stream, dnormed, dx)
    programs = max(1, min(ceil_div(rows, options["ROWS"]), _PROGRAMS // options["BLOCK_C"]))
    partials = None
    if sums := 2 * (dnormed is not None) + (a.x_bias is not None):
        partials = stream.new_empty(programs, sums, channels, dtype=torch.float32)
    launch(
        add_norm_backward,
        (programs,),
        *(dnormed, dsummed, summed, x, *map(contiguous, (a.x_bias, a.weight))),
        *((None, None) if dnormed is None else saved),
        *(*_seed_and_layout(a), dresidual, dx, partials),
        *(a.layout.num_sequences, rows, a.offset, channels),
        channels if summed is None else summed.stride(0),
        channels if x is None else x.stride(0),
        *_scale(a),
        **options,
        DROPS=a.dropout > 0,
    )
    gradients: dict[str, Tensor | None] = {"x": dx, "residual": dresidual}
    return gradients | _of_parameters(a, partials)


def _of_parameters(a: NormArguments, partials: Tensor | None) -> dict[str, Tensor | None]:
    none: dict[str, Tensor | None] = {"weight": None, "bias": None, "x_bias": None}
    if partials is None:
        return none
    if a.weight is None:
        assert a.x_bias is not None
        return none | {"x_bias": summed(partials, a.x_bias.dtype)[0]}
    if a.x_bias is None:
        of_norm = summed(partials, a.weight.dtype)
        return none | {"weight": of_norm[0], "bias": of_norm[1]}
    of_norm, of_branch = summed_parts(partials, a.weight.dtype, a.x_bias.dtype)
    return {"weight": of_norm[0], "bias": of_norm[1], "x_bias": of_branch}


def _scale(a: NormArguments) -> tuple[float, float]:
    return a.scale / (1 - a.dropout), a.dropout


def _seed_and_layout(a: NormArguments) -> tuple[Tensor | None, Tensor]:
    seed = seed_tensor(a.seed, a.layout.device) if a.dropout else None
    return seed, a.layout.cu_seqlens


def _configuration(channels: int, *tensors: Tensor | None) -> dict[str, Any]:
    """Return constants and options with which a warp loads 16 bytes a thread of the widest tensor.

    The warps lie side by side in a row, so that a thread has the same columns in all rows: it adds
    the gradients of the parameters, and decides which elements to drop, without exchange.
    """
    widest = max(x.element_size() for x in tensors if x is not None)
    vector = 16 // widest
    block = max(32 * vector, 1 << (channels - 1).bit_length())
    warps = min(_MOST_WARPS, max(1, block // (32 * vector)))
    rows = _ROWS if block < _WIDE else _ROWS_WIDE
    return {"ROWS": rows, "BLOCK_C": block, "VEC": vector, "num_warps": warps}


@triton.jit
def _columns(channels, VEC: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the columns of a tile and which of them exist, (BLOCK_C,)."""
    # A thread takes VEC columns of every tensor, narrow or wide. Else the compiler would give it
    # more of the narrow ones, and would exchange values between threads through shared memory.
    c = tl.max_contiguous(tl.arange(0, BLOCK_C), VEC)
    return c, c < channels


@triton.jit
def _rows(tensor, row, c, stride, mask):
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
    residual,  # (rows, C)
    x,  # (rows, C), or None
    x_bias,  # (C,), or None
    weight,  # (C,), or None without a norm
    bias,  # (C,), or None without a norm
    seed,  # int64 (1,)
    cu_seqlens,  # int32 (N + 1,)
    summed,  # (rows, C), written; None if only the norm is wanted
    normed,  # (rows, C), written; None without a norm
    means,  # float32 (rows,), means of the rows, written; None without a norm
    rstds,  # float32 (rows,), inverse standard deviations, written; None without a norm
    sequences,  # N
    rows,  # rows of all tensors, including the tail
    offset,
    channels,  # C
    residual_stride,
    x_stride,
    scale,  # factor of x, divided by the share of kept elements
    probability,  # probability to drop an element
    eps,  # added to the variance
    DROPS: tl.constexpr,  # whether to drop elements
    VEC: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a program
    BLOCK_C: tl.constexpr,  # a power of two, at least C
):
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    c, inside = _columns(channels, VEC, BLOCK_C)
    real = row < tl.load(cu_seqlens + sequences)
    exists = row < rows
    mask = real[:, None] & inside[None, :]
    stored = exists[:, None] & inside[None, :]
    total = _sum(
        residual, x, x_bias, row, c, inside, mask, residual_stride, x_stride, seed, first, scale,
        probability, offset, DROPS, ROWS, BLOCK_C,
    )  # fmt: skip
    at = row.to(tl.int64)[:, None] * channels + c[None, :]
    if summed is not None:
        tl.store(summed + at, total.to(summed.dtype.element_ty), mask=stored)
    if normed is not None:
        mean = tl.sum(total, 1) / channels
        centred = tl.where(inside[None, :], total - mean[:, None], 0.0)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / channels + eps)
        w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
        y = centred * rstd[:, None] * w[None, :] + b[None, :]
        y = tl.where(real[:, None], y, 0.0)
        tl.store(normed + at, y.to(normed.dtype.element_ty), mask=stored)
        tl.store(means + row, mean, mask=exists)
        tl.store(rstds + row, rstd, mask=exists)


@triton.jit(do_not_specialize=["sequences", "rows", "offset"])
def add_norm_backward(
    dnormed,  # (rows, C), or None without a norm
    dsummed,  # (rows, C), or None if only the norm was wanted
    summed,  # (rows, C), what was normalized, or the residual if ``x`` is given; or None
    x,  # (rows, C), to which the residual is added again, or None
    x_bias,  # (C,), or None. It is read with `x`; without, it only has a gradient.
    weight,  # (C,), or None without a norm
    means,  # float32 (rows,), or None without a norm
    rstds,  # float32 (rows,), or None without a norm
    seed,  # int64 (1,)
    cu_seqlens,  # int32 (N + 1,)
    dresidual,  # (rows, C), written
    dx,  # (rows, C), written, or None
    partials,  # float32 (programs, P, C), written: weight and bias, ``x_bias``; or None
    sequences,  # N
    rows,  # rows of all tensors, including the tail
    offset,
    channels,  # C
    summed_stride,
    x_stride,
    scale,  # factor of x, divided by the share of kept elements
    probability,  # probability to drop an element
    DROPS: tl.constexpr,  # whether elements were dropped
    VEC: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a tile
    BLOCK_C: tl.constexpr,  # a power of two, at least C
):
    """Write gradients of residual and branch, and partial sums of the parameters' gradients.

    Program i of n takes rows from ROWS i, from ROWS (i + n) and so on, and adds their shares of the
    parameters' gradients in this order.
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
        stored = (row < rows)[:, None] & inside[None, :]
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
        tl.store(dresidual + at, gradient.to(dresidual.dtype.element_ty), mask=stored)
        if dx is not None:
            if DROPS:
                keep = keep_elements(tl.load(seed), first, 0, offset, probability, ROWS, BLOCK_C)
                gradient = tl.where(keep, gradient, 0.0)
            gradient *= scale
            tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=stored)
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
