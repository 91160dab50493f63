"""`batch_norm` in Triton: one pass forward; one for the sums and one for the gradient backward.

Threads load 16 bytes at a time. Sums are over spans of rows in a fixed order, so that results
repeat to the bit.
"""

# pyright: reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.batch_norm import BatchNormArguments
from effasr_kernels.runtime.counters import program_counters
from effasr_kernels.runtime.dispatch import Gradients, Tensors
from effasr_kernels.runtime.launch import ceil_div, launch, unit_stride
from effasr_kernels.shared.last_program import is_last_program
from effasr_kernels.shared.partial_sums import sum_of_columns

_ELEMENTS, _ELEMENTS_BACKWARD = 4_096, 2_048
"""Elements of a tile: 32 and 16 per thread. The backward has two inputs and six numbers per
channel; with more elements their registers would leave too few threads to hide the loads."""

_SPAN, _SPAN_C = 64, 32
"""Rows and channels of a partial sum. The last program of a block of channels adds them when the
others have ended. On an H200, spans of 256 rows and 64 channels take 1.5 times as long."""


def forward(a: BatchNormArguments) -> tuple[tuple[Tensor], tuple[()]]:
    x, layout = unit_stride(a.x), a.layout
    channels = x.shape[1]
    y = x.new_empty(layout.rows, channels)
    block, block_c = _tile(channels, _ELEMENTS)
    launch(
        normalize,
        (ceil_div(layout.rows, block), ceil_div(channels, block_c)),
        *(x, *_parameters(a), layout.cu_seqlens, y),
        *(layout.num_sequences, layout.rows, x.stride(0), channels, a.eps),
        SILU=a.silu,
        BLOCK=block,
        BLOCK_C=block_c,
    )
    return (y,), ()


def backward(a: BatchNormArguments, grads: Tensors, results: Tensors, saved: Tensors) -> Gradients:
    x, layout = unit_stride(a.x), a.layout
    channels, sequences = x.shape[1], layout.num_sequences
    parameters = _parameters(a)
    spans, blocks_c = ceil_div(layout.rows, _SPAN), ceil_div(channels, _SPAN_C)
    partials = x.new_empty(2, spans, channels, dtype=torch.float32)
    # Without a row nothing is launched.
    sums = (torch.empty if spans else torch.zeros)(
        2, channels, dtype=torch.float32, device=x.device
    )
    launch(
        sum_gradients,
        (spans, blocks_c),
        *(grads[0], x, *parameters, layout.cu_seqlens, partials, sums),
        program_counters(x, blocks_c),
        *(sequences, x.stride(0), channels, a.eps),
        SILU=a.silu,
        BLOCK=_ELEMENTS_BACKWARD // _SPAN_C,
        BLOCK_C=_SPAN_C,
        SPAN=_SPAN,
    )
    block, block_c = _tile(channels, _ELEMENTS_BACKWARD)
    dx = x.new_empty(layout.rows, channels)
    launch(
        normalize_backward,
        (ceil_div(layout.rows, block), ceil_div(channels, block_c)),
        *(grads[0], x, *parameters, layout.cu_seqlens, sums, dx),
        *(sequences, layout.rows, x.stride(0), channels, a.eps),
        SILU=a.silu,
        FIXED=a.fixed,
        BLOCK=block,
        BLOCK_C=block_c,
    )
    dweight, dbias = sums.unbind(0)
    return {
        "x": dx,
        "weight": dweight.to(a.weight.dtype),
        "bias": dbias.to(a.bias.dtype),
        "mean": None,
        "variance": None,
    }


def _parameters(a: BatchNormArguments) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in (a.weight, a.bias, a.mean, a.variance))


def _tile(channels: int, elements: int) -> tuple[int, int]:
    """Return the rows and channels of a tile, with the fewest surplus channels."""
    block_c = min((256, 128, 64), key=lambda size: ceil_div(channels, size) * size)
    return elements // block_c, block_c


@triton.jit
def _per_channel(weight, bias, mean, variance, eps, c, in_channels):
    """Return mean, reciprocal of the standard deviation, weight and bias, float32 (1, BLOCK_C)."""
    centre = tl.load(mean + c, mask=in_channels, other=0.0).to(tl.float32)
    spread = tl.load(variance + c, mask=in_channels, other=0.0).to(tl.float32)
    # Rounded to the nearest: an approximation would shift all rows of the channel.
    rstd = tl.div_rn(1.0, tl.sqrt_rn(spread + eps))
    w = tl.load(weight + c, mask=in_channels, other=0.0).to(tl.float32)
    b = tl.load(bias + c, mask=in_channels, other=0.0).to(tl.float32)
    return centre[None, :], rstd[None, :], w[None, :], b[None, :]


@triton.jit
def _derivative(dy, normal, w, b, SILU: tl.constexpr):
    """Return the gradient of the scaled and shifted values z, from the result's gradient."""
    if SILU:
        z = normal * w + b
        share = tl.sigmoid(z)
        dy *= share * (1 + z * (1 - share))
    return dy


@triton.jit(do_not_specialize=["sequences", "rows"])
def normalize(
    x,  # (rows, C)
    weight,  # (C,)
    bias,  # (C,)
    mean,  # (C,)
    variance,  # (C,)
    cu_seqlens,  # int32 (N + 1,)
    y,  # (rows, C), contiguous, written; zero in the tail
    sequences,  # N
    rows,  # rows of x and y
    x_stride,
    channels,  # C
    eps,  # added to the variance
    SILU: tl.constexpr,  # whether to apply SiLU
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Normalize one block of rows and channels; program (block of rows, block of channels)."""
    real = tl.load(cu_seqlens + sequences)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_channels = c < channels
    wide_row = row.to(tl.int64)[:, None]
    within = (row < real)[:, None] & in_channels[None, :]
    values = tl.load(x + wide_row * x_stride + c[None, :], mask=within, other=0.0).to(tl.float32)
    centre, rstd, w, b = _per_channel(weight, bias, mean, variance, eps, c, in_channels)
    z = (values - centre) * rstd * w + b
    if SILU:
        z *= tl.sigmoid(z)
    z = tl.where(within, z, 0.0)
    inside = (row < rows)[:, None] & in_channels[None, :]
    tl.store(y + wide_row * channels + c[None, :], z.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sequences"])
def sum_gradients(
    dy,  # (rows, C), contiguous
    x,  # (rows, C)
    weight,  # (C,)
    bias,  # (C,)
    mean,  # (C,)
    variance,  # (C,)
    cu_seqlens,  # int32 (N + 1,)
    partials,  # float32 (2, spans, C), written: gradients of the weight, then of the bias
    sums,  # float32 (2, C), written: the sums over the spans
    counters,  # int32 (blocks of channels,); see `is_last_program`
    sequences,  # N
    x_stride,
    channels,  # C
    eps,  # added to the variance
    SILU: tl.constexpr,  # whether the forward applies SiLU
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPAN: tl.constexpr,  # rows of a program, a multiple of BLOCK
):
    """Sum the gradients of weight and bias over a span of rows; program (span, block of channels).

    The last program of a block of channels adds up the spans.
    """
    span = tl.program_id(0)
    remaining = tl.minimum(tl.load(cu_seqlens + sequences) - span * SPAN, SPAN)
    row = tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_channels = c < channels
    centre, rstd, w, b = _per_channel(weight, bias, mean, variance, eps, c, in_channels)
    x += span.to(tl.int64) * SPAN * x_stride + row[:, None] * x_stride + c[None, :]
    dy += span.to(tl.int64) * SPAN * channels + row[:, None] * channels + c[None, :]
    dweight = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    dbias = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    for done in range(0, remaining, BLOCK):
        within = (done + row < remaining)[:, None] & in_channels[None, :]
        values = tl.load(x + done * x_stride, mask=within, other=0.0).to(tl.float32)
        grads = tl.load(dy + done * channels, mask=within, other=0.0).to(tl.float32)
        normal = (values - centre) * rstd
        dz = _derivative(grads, normal, w, b, SILU)
        dweight += dz * normal
        dbias += dz
    spans = tl.num_programs(0)
    of_bias = spans.to(tl.int64) * channels
    to = partials + span.to(tl.int64) * channels + c
    tl.store(to, tl.sum(dweight, 0), mask=in_channels)
    tl.store(to + of_bias, tl.sum(dbias, 0), mask=in_channels)
    if is_last_program(counters, tl.program_id(1), spans):
        total = sum_of_columns(partials, c, spans, channels, BLOCK, BLOCK_C)
        tl.store(sums + c, total, mask=in_channels)
        total = sum_of_columns(partials + of_bias, c, spans, channels, BLOCK, BLOCK_C)
        tl.store(sums + channels + c, total, mask=in_channels)


@triton.jit(do_not_specialize=["sequences", "rows"])
def normalize_backward(
    dy,  # (rows, C), contiguous
    x,  # (rows, C)
    weight,  # (C,)
    bias,  # (C,)
    mean,  # (C,)
    variance,  # (C,)
    cu_seqlens,  # int32 (N + 1,)
    sums,  # float32 (2, C), gradients of the weight and of the bias
    dx,  # (rows, C), contiguous, written; zero in the tail
    sequences,  # N
    rows,  # rows of x, dy and dx
    x_stride,
    channels,  # C
    eps,  # added to the variance
    SILU: tl.constexpr,  # whether the forward applies SiLU
    FIXED: tl.constexpr,  # whether the statistics are constants
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute one block of the gradient of x; program (block of rows, block of channels)."""
    # With n the normalized values, R the number of real rows and dz the gradient of z, this is w /
    # sigma (dz - (n sum(dz n) + sum(dz)) / R), or w / sigma dz if FIXED.
    real = tl.load(cu_seqlens + sequences)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_channels = c < channels
    wide_row = row.to(tl.int64)[:, None]
    within = (row < real)[:, None] & in_channels[None, :]
    values = tl.load(x + wide_row * x_stride + c[None, :], mask=within, other=0.0).to(tl.float32)
    to = wide_row * channels + c[None, :]
    grads = tl.load(dy + to, mask=within, other=0.0).to(tl.float32)
    centre, rstd, w, b = _per_channel(weight, bias, mean, variance, eps, c, in_channels)
    normal = (values - centre) * rstd
    dz = _derivative(grads, normal, w, b, SILU)
    if not FIXED:
        share = tl.div_rn(1.0, tl.maximum(real, 1).to(tl.float32))
        dweight = tl.load(sums + c, mask=in_channels, other=0.0)[None, :]
        dbias = tl.load(sums + channels + c, mask=in_channels, other=0.0)[None, :]
        dz -= (normal * dweight + dbias) * share
    result = tl.where(within, dz * (w * rstd), 0.0)
    inside = (row < rows)[:, None] & in_channels[None, :]
    tl.store(dx + to, result.to(dx.dtype.element_ty), mask=inside)
