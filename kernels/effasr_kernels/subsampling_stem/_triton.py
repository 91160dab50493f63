"""`subsampling_stem` in Triton, with the first convolution's activation only in registers."""

# ruff: noqa: RUF005 (Triton cannot unpack a tuple into another)
# pyright: reportGeneralTypeIssues=false
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Gradients, Tensors
from effasr_kernels.runtime.launch import capability, ceil_div, launch
from effasr_kernels.runtime.tiles import count_tiles, find_tile, tile_programs
from effasr_kernels.shared.partial_sums import summed
from effasr_kernels.subsampling_stem import StemArguments

_PROGRAMS = 198
"""Rows of the backward's partial sums. With 256 channels and 64 per program, an H200 runs them in
two waves: three programs at a time fit into the registers of each of its 132 multiprocessors."""

_PATCH_SPAN = 128

_INT32_MAX = torch.iinfo(torch.int32).max


@dataclass(frozen=True, slots=True)
class Config:
    """Places and channels of a tile, places of a program and number of warps of one kernel."""

    block_p: int
    block_c: int
    span: int
    warps: int


def configs(dtype: torch.dtype, channels: int, major: int) -> tuple[Config, Config]:
    padded = max(16, 1 << (channels - 1).bit_length())
    if dtype == torch.float32:
        # Products without tensor cores need both factors in registers, so tiles are small.
        return Config(32, 32, 256, 4), Config(32, 32, 256, 4)
    both = Config(32, min(padded, 64), 256, 4)
    return both, both


def unsupported_reason(a: StemArguments) -> str | None:
    # Independent of grad mode: torch.library calls this without it and needs gradients later.
    if a.x.requires_grad:
        return "gives no gradient to x, which are features"
    if a.x.shape[0] // 4 * (a.x.shape[1] // 4) > _INT32_MAX:
        return "counts places of the result in int32"
    return None


def forward(a: StemArguments) -> tuple[tuple[Tensor], tuple[()]]:
    x, bins = a.x, a.x.shape[1]
    channels, sequences = a.weight.shape[0], a.layout.num_sequences
    cut, _ = configs(x.dtype, channels, capability(x.device)[0])
    y = x.new_empty(x.shape[0] // 4, bins // 4, channels)
    per_slot = a.rows_per_slot // 4 * (a.x.shape[1] // 4)
    lengths = a.lengths.contiguous()
    launch(
        stem_forward,
        (
            tile_programs(a.layout, cut.span, times=per_slot),
            ceil_div(channels, cut.block_c),
        ),
        _patches(x, a.layout, lengths, per_slot),
        *(t.contiguous() for t in (a.weight, a.bias, a.depthwise_weight, a.depthwise_bias)),
        *(a.layout.cu_seqlens, lengths, y, sequences, a.layout.rows, per_slot),
        num_warps=cut.warps,
        BINS=bins,
        CHANNELS=channels,
        BLOCK_P=cut.block_p,
        BLOCK_C=cut.block_c,
        SPAN=cut.span,
    )
    return (y,), ()


def backward(a: StemArguments, grads: Tensors, results: Tensors, saved: Tensors) -> Gradients:
    x, bins = a.x, a.x.shape[1]
    channels, sequences = a.weight.shape[0], a.layout.num_sequences
    _, cut = configs(x.dtype, channels, capability(x.device)[0])
    per_slot = a.rows_per_slot // 4 * (a.x.shape[1] // 4)
    spans = count_tiles(a.layout.rows * per_slot, sequences, cut.span)
    partials = x.new_empty(min(spans, _PROGRAMS), 20 * channels, dtype=torch.float32)
    lengths = a.lengths.contiguous()
    launch(
        stem_backward,
        (partials.shape[0], ceil_div(channels, cut.block_c)),
        _patches(x, a.layout, lengths, per_slot),
        *(t.contiguous() for t in (a.weight, a.bias, a.depthwise_weight)),
        *(a.layout.cu_seqlens, lengths, grads[0], partials),
        *(sequences, a.layout.rows, per_slot, spans),
        num_warps=cut.warps,
        BINS=bins,
        CHANNELS=channels,
        BLOCK_P=cut.block_p,
        BLOCK_C=cut.block_c,
        SPAN=cut.span,
    )
    parts = summed(partials, x.dtype).split([9 * channels, channels] * 2)
    return {
        "weight": parts[0].view(channels, 9),
        "bias": parts[1],
        "depthwise_weight": parts[2].view(channels, 9),
        "depthwise_bias": parts[3],
    }


def _patches(x: Tensor, layout: PackedLayout, lengths: Tensor, per_slot: int) -> Tensor:
    """Return the input patches of the first convolution, (s T / 2, F / 2, 16)."""
    rows, bins = x.shape
    patches = x.new_empty(rows // 2, bins // 2, 16)
    launch(
        stem_patches,
        (tile_programs(layout, _PATCH_SPAN, times=per_slot),),
        *(x.contiguous(), layout.cu_seqlens, lengths, patches),
        *(layout.num_sequences, layout.rows, per_slot),
        BINS=bins,
        BLOCK_Q=64,
        SPAN=_PATCH_SPAN,
    )
    return patches


@triton.jit
def _find_places(
    cu_seqlens, lengths, sequences, slots, per_slot, tile, BINS: tl.constexpr, SPAN: tl.constexpr
):
    """Find a span of places (row and column of the result) within one utterance."""
    # Returns the first place of the utterance, int64; its places; the first place of the span,
    # relative to the utterance; the mel rows, 0 in the tail; and the utterance's first row in `x`,
    # int64.
    sequence, first, count, start = find_tile(cu_seqlens, sequences, slots, tile, SPAN, per_slot)
    length = tl.load(lengths + sequence, mask=sequence < sequences, other=0).to(tl.int32)
    # A row of BINS / 4 places corresponds to 4 mel rows.
    return first, count, start, length, first // (BINS // 4) * 4


@triton.jit(do_not_specialize=["sequences", "slots", "per_slot"])
def stem_patches(
    x,  # (s T, F), contiguous
    cu_seqlens,  # int32 (N + 1,), offsets of the slots of each utterance
    lengths,  # (N,), mel rows of each utterance
    patches,  # (s T / 2, F / 2, 16), contiguous, the dtype of `x`, written except in the tail
    sequences,  # N
    slots,  # T
    per_slot,  # places of the result in a slot, s / 4 times F / 4; 4 times that before
    BINS: tl.constexpr,  # F
    BLOCK_Q: tl.constexpr,
    SPAN: tl.constexpr,  # places of the result in a program
):
    """Write the inputs of the first convolution at each of its places; one program per span."""
    # The 16 elements of a patch are nine mel values, a one for the bias, and zeros. All are zero in
    # rows past the length, so that the convolution is zero there.
    first, count, start, length, mel_begin = _find_places(
        cu_seqlens, lengths, sequences, slots, per_slot, tl.program_id(0), BINS, SPAN
    )
    if start >= count or length == 0:
        return
    WIDTH: tl.constexpr = BINS // 2
    n = tl.arange(0, BLOCK_Q)
    k = tl.arange(0, 16)[None, :]
    for done in range(0, 4 * tl.minimum(SPAN, count - start), BLOCK_Q):
        begin = 4 * start + done
        row = ((begin + n) // WIDTH)[:, None]
        column = ((begin + n) % WIDTH)[:, None]
        inside = (begin + n < 4 * count)[:, None]
        real = inside & (2 * row < length)
        mel_row = 2 * row - 1 + k // 3
        mel_column = 2 * column - 1 + k % 3
        inside_image = (mel_row >= 0) & (mel_row < length) & (mel_column >= 0) & (k < 9)
        top = begin // WIDTH
        at = x + (mel_begin + 2 * top) * BINS + ((mel_row - 2 * top) * BINS + mel_column)
        values = tl.load(at, mask=real & inside_image, other=0.0)
        values = tl.where(real & (k == 9), 1.0, values).to(values.dtype)
        to = patches + (4 * first + begin) * 16 + (n[:, None] * 16 + k)
        tl.store(to, values, mask=inside)


@triton.jit
def _patch(patches, row, column, inside, TAP: tl.constexpr, BINS: tl.constexpr):
    """Load the patches of one tap of the second convolution, (BLOCK_P, 16)."""
    inside_patch = inside
    if TAP < 3:
        inside_patch = inside_patch & (row > 0)
    if TAP % 3 == 0:
        inside_patch = inside_patch & (column > 0)
    shift = ((TAP // 3 - 1) * (BINS // 2) + TAP % 3 - 1) * 16
    at = patches[:, None] + (shift + tl.arange(0, 16)[None, :])
    return tl.load(at, mask=inside_patch[:, None], other=0.0)


@triton.jit
def _filters(weight, bias, c, CHANNELS: tl.constexpr):
    """Load weights and bias of the first convolution in the order of `_patch`, (BLOCK_C, 16)."""
    k = tl.arange(0, 16)[None, :]
    in_channels = (c < CHANNELS)[:, None]
    weights = tl.load(weight + c[:, None] * 9 + k, mask=in_channels & (k < 9), other=0.0)
    biases = tl.load(bias + c[:, None] + 0 * k, mask=in_channels & (k == 9), other=0.0)
    return weights + biases


@triton.jit(do_not_specialize=["sequences", "slots", "per_slot"])
def stem_forward(
    patches,  # (s T / 2, F / 2, 16), contiguous
    weight,  # (C, 9), weights of the first convolution
    bias,  # (C,), bias of the first convolution
    taps,  # (C, 9), weights of the second convolution
    offset,  # (C,), bias of the second convolution
    cu_seqlens,  # int32 (N + 1,), offsets of the slots of each utterance
    lengths,  # (N,), mel rows of each utterance
    y,  # (s T / 4, F / 4, C), contiguous, written; zero in rows past the length
    sequences,  # N
    slots,  # T
    per_slot,  # places in a slot, s / 4 times F / 4
    BINS: tl.constexpr,  # F
    CHANNELS: tl.constexpr,  # C
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPAN: tl.constexpr,  # places of a program, a multiple of BLOCK_P
):
    """Compute one span of places and one block of channels; program (span, block)."""
    # Channels are the rows of every product, so that a thread holds few of them and their taps stay
    # in registers.
    first, count, start, length, _ = _find_places(
        cu_seqlens, lengths, sequences, slots, per_slot, tl.program_id(0), BINS, SPAN
    )
    if start >= count:
        return
    WIDTH: tl.constexpr = BINS // 4
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_channels = c < CHANNELS
    filters = _filters(weight, bias, c, CHANNELS)
    shift = tl.load(offset + c, mask=in_channels, other=0.0).to(tl.float32)
    n = tl.arange(0, BLOCK_P)
    # The loop starts at 0 because the compiler loses all alignments if it starts at a loaded value.
    for done in range(0, tl.minimum(SPAN, count - start), BLOCK_P):
        begin = start + done
        p = begin + n
        row = p // WIDTH
        column = p % WIDTH
        inside = (p < count) & (4 * row < length)
        top = begin // WIDTH
        from_x = patches + (4 * first + top * BINS) * 16 + ((row - top) * BINS + 2 * column) * 16
        acc = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
        for tap in tl.static_range(9):
            patch = _patch(from_x, row, column, inside, tap, BINS)
            z = tl.dot(filters, tl.trans(patch), input_precision="ieee")
            z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
            w = tl.load(taps + c * 9 + tap, mask=in_channels, other=0.0).to(tl.float32)
            acc += z * w[:, None]
        acc = tl.where(inside[None, :], acc + shift[:, None], 0.0)
        to = y + (first + begin) * CHANNELS + (n[None, :] * CHANNELS + c[:, None])
        tl.store(to, acc.to(y.dtype.element_ty), mask=(p < count)[None, :] & in_channels[:, None])


@triton.jit
def _gathered(
    total, patches, row, column, inside, filters, grad, TAP: tl.constexpr, BINS: tl.constexpr
):
    """Add the weighted patches of one tap where the first convolution is positive."""
    patch = _patch(patches, row, column, inside, TAP, BINS)
    z = tl.dot(filters, tl.trans(patch), input_precision="ieee")
    passed = tl.where(z > 0, grad, 0.0).to(grad.dtype)
    return tl.dot(passed, patch, acc=total, input_precision="ieee")


@triton.jit
def _finish(total, filters, taps, c, to, TAP: tl.constexpr, CHANNELS: tl.constexpr):
    """Store the gradient of one tap of the second convolution."""
    # Returns this tap's part of the gradients of the first convolution, (BLOCK_C, 16).
    in_channels = c < CHANNELS
    tl.store(
        to + 10 * CHANNELS + c * 9 + TAP,
        tl.sum(total * filters.to(tl.float32), 1),
        mask=in_channels,
    )
    w = tl.load(taps + c * 9 + TAP, mask=in_channels, other=0.0).to(tl.float32)
    return total * w[:, None]


@triton.jit(do_not_specialize=["sequences", "slots", "per_slot", "spans"])
def stem_backward(
    patches,  # (s T / 2, F / 2, 16), contiguous
    weight,  # (C, 9), weights of the first convolution
    bias,  # (C,), bias of the first convolution
    taps,  # (C, 9), weights of the second convolution
    cu_seqlens,  # int32 (N + 1,), offsets of the slots of each utterance
    lengths,  # (N,), mel rows of each utterance
    grad_y,  # (s T / 4, F / 4, C), contiguous
    partials,  # float32 (programs, 20 C), written: of weight (C, 9), bias, taps (C, 9), bias
    sequences,  # N
    slots,  # T
    per_slot,  # places in a slot, s / 4 times F / 4
    spans,
    BINS: tl.constexpr,  # F
    CHANNELS: tl.constexpr,  # C
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPAN: tl.constexpr,  # places of a span, a multiple of BLOCK_P
):
    r"""Compute gradients of a block of channels; program (i, block) of n takes spans i, i + n...

    All gradients follow from one sum for each tap (i, j) of the second convolution,

    .. math:: D_{ij,ck} = \sum_{rf} g_{rfc} \, [z_{2r+i-1,\,2f+j-1,\,c} > 0] \, P_{ij,rfk}

    with the patches P of mel values and the first convolution z. The gradient of the weights of the
    first convolution is :math:`\sum_{ij} w'_{c,ij} D_{ij,ck}`, that of a tap
    :math:`\sum_k w_{ck} D_{ij,ck}`. No factor of the product is rounded, because each gradient is
    either used unchanged or masked.
    """
    WIDTH: tl.constexpr = BINS // 4
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_channels = c < CHANNELS
    filters = _filters(weight, bias, c, CHANNELS)
    n = tl.arange(0, BLOCK_P)
    # Sums over places are products with ones; reductions would exchange values at every step.
    ones = tl.full((BLOCK_P, 16), 1.0, patches.dtype.element_ty)
    total = tl.zeros((BLOCK_C, 16), tl.float32)
    parts = (tl.zeros((BLOCK_C, 16), tl.float32),) * 9
    for span in range(tl.program_id(0), spans, tl.num_programs(0)):
        first, count, start, length, _ = _find_places(
            cu_seqlens, lengths, sequences, slots, per_slot, span, BINS, SPAN
        )
        for done in range(0, tl.minimum(SPAN, count - start), BLOCK_P):
            begin = start + done
            p = begin + n
            row = p // WIDTH
            column = p % WIDTH
            inside = (p < count) & (4 * row < length)
            top = begin // WIDTH
            from_x = (
                patches + (4 * first + top * BINS) * 16 + ((row - top) * BINS + 2 * column) * 16
            )
            at = grad_y + (first + begin) * CHANNELS + (n[None, :] * CHANNELS + c[:, None])
            g = tl.load(at, mask=inside[None, :] & in_channels[:, None], other=0.0)
            total = tl.dot(g, ones, acc=total, input_precision="ieee")
            for tap in tl.static_range(9):
                part = _gathered(parts[tap], from_x, row, column, inside, filters, g, tap, BINS)
                parts = parts[:tap] + (part,) + parts[tap + 1 :]
    to = partials + tl.program_id(0).to(tl.int64) * (CHANNELS * 20)
    grads = _finish(parts[0], filters, taps, c, to, 0, CHANNELS)
    for tap in tl.static_range(1, 9):
        grads += _finish(parts[tap], filters, taps, c, to, tap, CHANNELS)
    k = tl.arange(0, 16)[None, :]
    index = tl.where(k < 9, c[:, None] * 9 + k, 9 * CHANNELS + c[:, None])
    tl.store(to + index, grads, mask=in_channels[:, None] & (k < 10))
    # All 16 columns are equal.
    tl.store(to + 19 * CHANNELS + c, tl.sum(total, 1) / 16, mask=in_channels)
