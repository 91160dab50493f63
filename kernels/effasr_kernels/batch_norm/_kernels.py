"""Kernels of `batch_norm`: the forward, the sums of the backward, and the gradient of the input."""

from __future__ import annotations

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from effasr_kernels.shared.last_program import is_last_program
from effasr_kernels.shared.partial_sums import sum_of_columns


@triton.jit
def _per_channel(weight, bias, mean, variance, eps, c, known):
    """Load the parameters and statistics of channels, float32 (1, BLOCK_C) each.

    Returns:
        The mean, the reciprocal of the standard deviation, the weight and the bias.
    """
    centre = tl.load(mean + c, mask=known, other=0.0).to(tl.float32)
    spread = tl.load(variance + c, mask=known, other=0.0).to(tl.float32)
    # Rounded to the nearest: an approximation would shift all rows of the channel.
    rstd = tl.div_rn(1.0, tl.sqrt_rn(spread + eps))
    w = tl.load(weight + c, mask=known, other=0.0).to(tl.float32)
    b = tl.load(bias + c, mask=known, other=0.0).to(tl.float32)
    return centre[None, :], rstd[None, :], w[None, :], b[None, :]


@triton.jit
def _derivative(dy, normal, w, b, SILU: tl.constexpr):
    """Return the gradient of the scaled and shifted values z, from that of the result."""
    if SILU:
        z = normal * w + b
        share = tl.sigmoid(z)
        dy *= share * (1 + z * (1 - share))
    return dy


@triton.jit(do_not_specialize=["sequences", "rows"])
def normalize(
    x,
    weight,
    bias,
    mean,
    variance,
    cu_seqlens,
    y,
    sequences,
    rows,
    x_stride,
    channels,
    eps,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Normalize one block of rows and channels; program (block of rows, block of channels).

    Args:
        x: (rows, C).
        weight: (C,).
        bias: (C,).
        mean: (C,).
        variance: (C,).
        cu_seqlens: int32 (N + 1,).
        y: (rows, C), contiguous, written; zero in the tail.
        sequences: N.
        rows: Rows of x and y.
        x_stride: Row stride of ``x`` in elements.
        channels: C.
        eps: Added to the variance.
        SILU: Whether to apply SiLU.
        BLOCK: Rows of a program.
        BLOCK_C: Channels of a program.
    """
    real = tl.load(cu_seqlens + sequences)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = c < channels
    wide_row = row.to(tl.int64)[:, None]
    within = (row < real)[:, None] & known[None, :]
    values = tl.load(x + wide_row * x_stride + c[None, :], mask=within, other=0.0).to(tl.float32)
    centre, rstd, w, b = _per_channel(weight, bias, mean, variance, eps, c, known)
    z = (values - centre) * rstd * w + b
    if SILU:
        z *= tl.sigmoid(z)
    z = tl.where(within, z, 0.0)
    inside = (row < rows)[:, None] & known[None, :]
    tl.store(y + wide_row * channels + c[None, :], z.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sequences"])
def sum_gradients(
    dy,
    x,
    weight,
    bias,
    mean,
    variance,
    cu_seqlens,
    partials,
    sums,
    counters,
    sequences,
    x_stride,
    channels,
    eps,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Sum the gradients of weight and bias over a span of rows; program (span, block of channels).

    The last program of a block of channels adds up the spans.

    Args:
        dy: (rows, C), contiguous.
        x: (rows, C).
        weight: (C,).
        bias: (C,).
        mean: (C,).
        variance: (C,).
        cu_seqlens: int32 (N + 1,).
        partials: float32 (2, spans, C), written: gradients of the weight, then of the bias.
        sums: float32 (2, C), written: the sums over the spans.
        counters: int32 (blocks of channels,); see `is_last_program`.
        sequences: N.
        x_stride: Row stride of ``x`` in elements.
        channels: C.
        eps: Added to the variance.
        SILU: Whether the forward applies SiLU.
        BLOCK: Rows of a tile.
        BLOCK_C: Channels of a program.
        SPAN: Rows of a program, a multiple of BLOCK.
    """
    span = tl.program_id(0)
    left = tl.minimum(tl.load(cu_seqlens + sequences) - span * SPAN, SPAN)
    row = tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = c < channels
    centre, rstd, w, b = _per_channel(weight, bias, mean, variance, eps, c, known)
    x += span.to(tl.int64) * SPAN * x_stride + row[:, None] * x_stride + c[None, :]
    dy += span.to(tl.int64) * SPAN * channels + row[:, None] * channels + c[None, :]
    dweight = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    dbias = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    for done in range(0, left, BLOCK):
        within = (done + row < left)[:, None] & known[None, :]
        values = tl.load(x + done * x_stride, mask=within, other=0.0).to(tl.float32)
        grads = tl.load(dy + done * channels, mask=within, other=0.0).to(tl.float32)
        normal = (values - centre) * rstd
        dz = _derivative(grads, normal, w, b, SILU)
        dweight += dz * normal
        dbias += dz
    spans = tl.num_programs(0)
    of_bias = spans.to(tl.int64) * channels
    to = partials + span.to(tl.int64) * channels + c
    tl.store(to, tl.sum(dweight, 0), mask=known)
    tl.store(to + of_bias, tl.sum(dbias, 0), mask=known)
    if is_last_program(counters, tl.program_id(1), spans):
        total = sum_of_columns(partials, c, spans, channels, BLOCK, BLOCK_C)
        tl.store(sums + c, total, mask=known)
        total = sum_of_columns(partials + of_bias, c, spans, channels, BLOCK, BLOCK_C)
        tl.store(sums + channels + c, total, mask=known)


@triton.jit(do_not_specialize=["sequences", "rows"])
def normalize_backward(
    dy,
    x,
    weight,
    bias,
    mean,
    variance,
    cu_seqlens,
    sums,
    dx,
    sequences,
    rows,
    x_stride,
    channels,
    eps,
    SILU: tl.constexpr,
    FIXED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    r"""Compute one block of the gradient of x; program (block of rows, block of channels).

    With n the normalized values, R the number of real rows and dz the gradient of z, this is
    w / sigma (dz - (n sum(dz n) + sum(dz)) / R), or w / sigma dz if FIXED.

    Args:
        dy: (rows, C), contiguous.
        x: (rows, C).
        weight: (C,).
        bias: (C,).
        mean: (C,).
        variance: (C,).
        cu_seqlens: int32 (N + 1,).
        sums: float32 (2, C), gradients of the weight and of the bias.
        dx: (rows, C), contiguous, written; zero in the tail.
        sequences: N.
        rows: Rows of x, dy and dx.
        x_stride: Row stride of ``x`` in elements.
        channels: C.
        eps: Added to the variance.
        SILU: Whether the forward applies SiLU.
        FIXED: Whether the statistics are constants.
        BLOCK: Rows of a program.
        BLOCK_C: Channels of a program.
    """
    real = tl.load(cu_seqlens + sequences)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = c < channels
    wide_row = row.to(tl.int64)[:, None]
    within = (row < real)[:, None] & known[None, :]
    values = tl.load(x + wide_row * x_stride + c[None, :], mask=within, other=0.0).to(tl.float32)
    to = wide_row * channels + c[None, :]
    grads = tl.load(dy + to, mask=within, other=0.0).to(tl.float32)
    centre, rstd, w, b = _per_channel(weight, bias, mean, variance, eps, c, known)
    normal = (values - centre) * rstd
    dz = _derivative(grads, normal, w, b, SILU)
    if not FIXED:
        share = tl.div_rn(1.0, tl.maximum(real, 1).to(tl.float32))
        dweight = tl.load(sums + c, mask=known, other=0.0)[None, :]
        dbias = tl.load(sums + channels + c, mask=known, other=0.0)[None, :]
        dz -= (normal * dweight + dbias) * share
    result = tl.where(within, dz * (w * rstd), 0.0)
    inside = (row < rows)[:, None] & known[None, :]
    tl.store(dx + to, result.to(dx.dtype.element_ty), mask=inside)
