"""`strided_depthwise` in Triton."""

# ruff: noqa: RUF005 (Triton cannot unpack a tuple into another)
# pyright: reportGeneralTypeIssues=false
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.runtime.dispatch import Gradients, Tensors
from effasr_kernels.runtime.launch import ceil_div, launch
from effasr_kernels.runtime.tiles import count_tiles, find_tile, tile_programs
from effasr_kernels.shared.partial_sums import keep_sums, summed
from effasr_kernels.strided_depthwise import StridedArguments

_PROGRAMS = 528
"""Rows of the backward's partial sums: four programs per multiprocessor of an H200 (132)."""

_INT32_MAX = torch.iinfo(torch.int32).max


@dataclass(frozen=True, slots=True)
class Config:
    """Places and channels of a tile and places of a program of one kernel."""

    block_p: int
    block_c: int
    span: int


def configs(channels: int) -> tuple[Config, Config]:
    """Return the configurations of the forward and backward (8 and 4 channels per thread)."""
    block_c = min(256, max(16, 1 << (channels - 1).bit_length()))
    return Config(1024 // block_c, block_c, 128), Config(512 // block_c, block_c, 128)


def unsupported_reason(a: StridedArguments) -> str | None:
    if a.layout.rows * (a.x.shape[1] // 2) > _INT32_MAX:
        return "counts places of the result in int32"
    return None


def forward(a: StridedArguments) -> tuple[tuple[Tensor], tuple[()]]:
    layout, (_, bins, channels) = a.layout, a.x.shape
    sequences, width = layout.num_sequences, bins // 2
    cut, _ = configs(channels)
    y = a.x.new_empty(layout.rows, width, channels)
    launch(
        strided_forward,
        (tile_programs(layout, cut.span, times=width), ceil_div(channels, cut.block_c)),
        *(t.contiguous() for t in (a.x, a.weight, a.bias)),
        *(layout.cu_seqlens, a.lengths.contiguous(), y, sequences, layout.rows),
        RELU=a.relu,
        BINS=bins,
        CHANNELS=channels,
        BLOCK_P=cut.block_p,
        BLOCK_C=cut.block_c,
        SPAN=cut.span,
    )
    return (y,), ()


def backward(a: StridedArguments, grads: Tensors, results: Tensors, saved: Tensors) -> Gradients:
    x, layout, (_, bins, channels) = a.x, a.layout, a.x.shape
    sequences, width = layout.num_sequences, bins // 2
    _, cut = configs(channels)
    spans = count_tiles(layout.rows * width, sequences, cut.span)
    grad_x = x.new_empty(x.shape)
    partials = x.new_empty(min(spans, _PROGRAMS), 10 * channels, dtype=torch.float32)
    of_grad_x = partials.new_empty(partials.shape[0], channels)
    launch(
        strided_backward,
        (partials.shape[0], ceil_div(channels, cut.block_c)),
        *(t.contiguous() for t in (x, a.weight)),
        *(layout.cu_seqlens, a.lengths.contiguous(), grads[0], grad_x, partials, of_grad_x),
        *(sequences, layout.rows, spans),
        RELU=a.relu,
        BINS=bins,
        CHANNELS=channels,
        BLOCK_P=cut.block_p,
        BLOCK_C=cut.block_c,
        SPAN=cut.span,
    )
    keep_sums(grad_x, of_grad_x)
    sums = summed(partials, x.dtype)
    weight, bias = sums.split([9 * channels, channels])
    return {"x": grad_x, "weight": weight.view(channels, 9), "bias": bias}


@triton.jit
def _find_places(
    cu_seqlens, lengths, sequences, slots, tile, BINS: tl.constexpr, SPAN: tl.constexpr
):
    """Find a span of places (row and column of the result) within one sequence."""
    # Returns the first place of the sequence, int64; its places; the first place of the span,
    # relative to the sequence; and the input rows, 0 in the tail.
    sequence, first, count, start = find_tile(cu_seqlens, sequences, slots, tile, SPAN, BINS // 2)
    length = tl.load(lengths + sequence, mask=sequence < sequences, other=0).to(tl.int32)
    return first, count, start, length


@triton.jit
def _taps(weight, c, in_channels):
    """Load the nine taps of each channel, float32 (1, BLOCK_C) each."""
    taps = ()
    for k in tl.static_range(9):
        tap = tl.load(weight + c * 9 + k, mask=in_channels, other=0.0)
        taps = taps + (tap.to(tl.float32)[None, :],)
    return taps


@triton.jit
def _wide(pointers, in_rows, in_channels):
    """Load a tile in float32; masked elements are zero."""
    mask = in_rows[:, None] & in_channels[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _input(pointers, in_rows, in_channels, RELU: tl.constexpr):
    """Load a tile of the input in float32, after ReLU if RELU; masked elements are zero."""
    x = _wide(pointers, in_rows, in_channels)
    # Not the maximum, which would be 0 for NaN.
    return tl.where(x < 0, 0.0, x) if RELU else x


@triton.jit
def _grad_input(grad, x, RELU: tl.constexpr):
    """Return the gradient before ReLU from that after it; ``x`` is the loaded input."""
    return tl.where(x == 0, 0.0, grad) if RELU else grad


@triton.jit(do_not_specialize=["sequences", "slots"])
def strided_forward(
    x,  # (2 T, G, C), contiguous
    weight,  # (C, 9), contiguous
    bias,  # (C,), contiguous
    cu_seqlens,  # int32 (N + 1,), offsets of the slots of each sequence
    lengths,  # (N,), rows of `x` of each sequence
    y,  # (T, G / 2, C), contiguous, written; zero in rows past the length
    sequences,  # N
    slots,  # T; a slot has G / 2 places
    RELU: tl.constexpr,  # whether to apply ReLU to `x`
    BINS: tl.constexpr,  # G
    CHANNELS: tl.constexpr,  # C
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPAN: tl.constexpr,  # places of a program, a multiple of BLOCK_P
):
    """Compute one span of places and one block of channels; program (span, block)."""
    first, count, start, length = _find_places(
        cu_seqlens, lengths, sequences, slots, tl.program_id(0), BINS, SPAN
    )
    if start >= count:
        return
    WIDTH: tl.constexpr = BINS // 2
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_channels = c < CHANNELS
    w0, w1, w2, w3, w4, w5, w6, w7, w8 = _taps(weight, c, in_channels)
    offset = tl.load(bias + c, mask=in_channels, other=0.0).to(tl.float32)[None, :]
    n = tl.arange(0, BLOCK_P)
    # The loop starts at 0 because the compiler loses all alignments if it starts at a loaded value.
    for done in range(0, tl.minimum(SPAN, count - start), BLOCK_P):
        begin = start + done
        row = (begin + n) // WIDTH
        column = (begin + n) % WIDTH
        inside = begin + n < count
        real = inside & (2 * row < length)
        top = begin // WIDTH
        # Place (r, f) reads from row 2 r, column 2 f; the input has four elements per place.
        from_top = ((row - top) * (2 * BINS) + 2 * column)[:, None] * CHANNELS + c[None, :]
        at = x + (4 * first + top * (2 * BINS)) * CHANNELS + from_top
        above = real & (row > 0)
        below = real & (2 * row + 1 < length)
        not_first = column > 0
        acc = _input(at, real, in_channels, RELU) * w4 + offset
        acc += _input(at - (BINS + 1) * CHANNELS, above & not_first, in_channels, RELU) * w0
        acc += _input(at - BINS * CHANNELS, above, in_channels, RELU) * w1
        acc += _input(at - (BINS - 1) * CHANNELS, above, in_channels, RELU) * w2
        acc += _input(at - CHANNELS, real & not_first, in_channels, RELU) * w3
        acc += _input(at + CHANNELS, real, in_channels, RELU) * w5
        acc += _input(at + (BINS - 1) * CHANNELS, below & not_first, in_channels, RELU) * w6
        acc += _input(at + BINS * CHANNELS, below, in_channels, RELU) * w7
        acc += _input(at + (BINS + 1) * CHANNELS, below, in_channels, RELU) * w8
        acc = tl.where(real[:, None], acc, 0.0)
        to = y + (first + begin) * CHANNELS + (n[:, None] * CHANNELS + c[None, :])
        tl.store(to, acc.to(y.dtype.element_ty), mask=inside[:, None] & in_channels[None, :])


@triton.jit(do_not_specialize=["sequences", "slots", "spans"])
def strided_backward(
    x,  # (2 T, G, C), contiguous
    weight,  # (C, 9), contiguous
    cu_seqlens,  # int32 (N + 1,), offsets of the slots of each sequence
    lengths,  # (N,), rows of `x` of each sequence
    grad_y,  # (T, G / 2, C), contiguous
    grad_x,  # (2 T, G, C), contiguous, written; zero in rows past the length
    partials,  # float32 (programs, 9 C + C), written: sums for the weight, then the bias
    of_grad_x,  # float32 (programs, C), written: sums of grad_x over rows and bands
    sequences,  # N
    slots,  # T; a slot has G / 2 places
    spans,
    RELU: tl.constexpr,  # whether to apply ReLU to `x`
    BINS: tl.constexpr,  # G
    CHANNELS: tl.constexpr,  # C
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPAN: tl.constexpr,  # places of a span, a multiple of BLOCK_P
):
    """Compute the gradients of a block of channels; program (i, block) of n takes spans i, i + n...

    Each place (r, f) of the result is assigned the four inputs of rows 2 r and 2 r + 1, columns 2 f
    and 2 f + 1. These enter only the results at (r, f), (r, f + 1), (r + 1, f) and
    (r + 1, f + 1), through all nine taps. Four inputs and four gradients thus suffice for all
    gradients, and each input is loaded once.
    """
    WIDTH: tl.constexpr = BINS // 2
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_channels = c < CHANNELS
    n = tl.arange(0, BLOCK_P)
    w0, w1, w2, w3, w4, w5, w6, w7, w8 = _taps(weight, c, in_channels)
    zeros = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    d0, d1, d2, d3, d4, d5, d6, d7, d8, total, of_x = (
        zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros
    )  # fmt: skip
    for span in range(tl.program_id(0), spans, tl.num_programs(0)):
        first, count, start, length = _find_places(
            cu_seqlens, lengths, sequences, slots, span, BINS, SPAN
        )
        for done in range(0, tl.minimum(SPAN, count - start), BLOCK_P):
            begin = start + done
            row = (begin + n) // WIDTH
            column = (begin + n) % WIDTH
            inside = begin + n < count
            top = begin // WIDTH
            at = (4 * first + top * (2 * BINS)) * CHANNELS
            at += ((row - top) * (2 * BINS) + 2 * column)[:, None] * CHANNELS + c[None, :]
            from_y = grad_y + (first + begin) * CHANNELS + (n[:, None] * CHANNELS + c[None, :])

            in_rows = inside & (2 * row < length)
            below = inside & (2 * row + 2 < length) & (begin + n + WIDTH < count)
            not_last = column < WIDTH - 1
            g = _wide(from_y, in_rows, in_channels)
            g_right = _wide(from_y + CHANNELS, in_rows & not_last, in_channels)
            g_below = _wide(from_y + WIDTH * CHANNELS, below, in_channels)
            g_aslant = _wide(from_y + (WIDTH + 1) * CHANNELS, below & not_last, in_channels)
            total += g

            odd = in_rows & (2 * row + 1 < length)
            a = _input(x + at, in_rows, in_channels, RELU)
            d4 += g * a
            grad_a = _grad_input(g * w4, a, RELU)
            b = _input(x + at + CHANNELS, in_rows, in_channels, RELU)
            d5 += g * b
            d3 += g_right * b
            grad_b = _grad_input(g * w5 + g_right * w3, b, RELU)
            e = _input(x + at + BINS * CHANNELS, odd, in_channels, RELU)
            d7 += g * e
            d1 += g_below * e
            grad_e = g * w7 + g_below * w1
            f = _input(x + at + (BINS + 1) * CHANNELS, odd, in_channels, RELU)
            d8 += g * f
            d6 += g_right * f
            d2 += g_below * f
            d0 += g_aslant * f
            grad_f = g * w8 + g_right * w6 + g_below * w2 + g_aslant * w0

            # The gradient is zero in rows past the length; the results below them are past it too.
            dtype: tl.constexpr = grad_x.dtype.element_ty
            mask = inside[:, None] & in_channels[None, :]
            grad_e = tl.where(odd[:, None], _grad_input(grad_e, e, RELU), 0.0)
            grad_f = tl.where(odd[:, None], _grad_input(grad_f, f, RELU), 0.0)
            # All are 0 in rows past the length, as masked gradients are.
            of_x += (grad_a + grad_b) + (grad_e + grad_f)
            tl.store(grad_x + at, grad_a.to(dtype), mask=mask)
            tl.store(grad_x + at + CHANNELS, grad_b.to(dtype), mask=mask)
            tl.store(grad_x + at + BINS * CHANNELS, grad_e.to(dtype), mask=mask)
            tl.store(grad_x + at + (BINS + 1) * CHANNELS, grad_f.to(dtype), mask=mask)
    partials += tl.program_id(0).to(tl.int64) * (10 * CHANNELS)
    # Once for all spans of a program, so that it does not matter that threads store apart.
    to = partials + c * 9
    sums = d0, d1, d2, d3, d4, d5, d6, d7, d8
    for k in tl.static_range(9):
        tl.store(to + k, tl.sum(sums[k], 0), mask=in_channels)
    tl.store(partials + 9 * CHANNELS + c, tl.sum(total, 0), mask=in_channels)
    of_grad_x += tl.program_id(0).to(tl.int64) * CHANNELS
    tl.store(of_grad_x + c, tl.sum(of_x, 0), mask=in_channels)
