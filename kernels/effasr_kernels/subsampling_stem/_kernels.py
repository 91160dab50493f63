"""Kernels of the stem on tensor cores, which recompute the first convolution for each of nine taps.

An output of the first convolution enters up to four results, 9 / 4 on average. Keeping it would
require an exchange between threads; recomputing it on tensor cores costs less, with the nine
weights and the bias padded to the 16 of one instruction. Its inputs are loaded as patches of 16
elements that `stem_patches` has written, zero for padding rows. With the masks of both layers
already applied, a tap is one load. The patches are a sixteenth of the activation of 256 channels.

Each result takes 9 x 16 multiply-adds on tensor cores and 9 x 2 other instructions (forward: ReLU,
multiply-add; backward: compare, select). Without tensor cores the forward alone would take 90
instructions and the loads of the patches.
"""

from __future__ import annotations

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from effasr_kernels.runtime.tiles import find_tile


@triton.jit
def _find_places(
    cu_places, lengths, sequences, places, tile, BINS: tl.constexpr, SPAN: tl.constexpr
):
    """Find a span of places (row and column of the result) within one utterance.

    Returns:
        The first place of the utterance, int64; its number of places; the first place of the span,
        relative to the utterance; the number of mel rows, 0 in the tail; the first row of the
        utterance in ``x``, int64.
    """
    sequence, first, count, start = find_tile(cu_places, sequences, places, tile, SPAN)
    length = tl.load(lengths + sequence, mask=sequence < sequences, other=0).to(tl.int32)
    # A row of BINS / 4 places corresponds to 4 mel rows.
    return first, count, start, length, first // (BINS // 4) * 4


@triton.jit(do_not_specialize=["sequences", "places"])
def stem_patches(
    x,
    cu_places,
    lengths,
    patches,
    sequences,
    places,
    BINS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Write the inputs of the first convolution at each of its places; one program per span.

    The 16 elements of a patch are nine mel values, a one for the bias, and zeros. All are zero in
    rows past the length, so that the convolution is zero there.

    Args:
        x: (s T, F), contiguous.
        cu_places: int32 (N + 1,), offsets of the places of the result of each utterance.
        lengths: (N,), mel rows of each utterance.
        patches: (s T / 2, F / 2, 16), contiguous, the dtype of ``x``, written except in the tail.
        sequences: N.
        places: s T / 4 times F / 4, places of the result; the first convolution has four times as
            many.
        BINS: F.
        BLOCK_Q: Places of the first convolution in a tile.
        SPAN: Places of the result in a program.
    """
    first, count, start, length, mel_begin = _find_places(
        cu_places, lengths, sequences, places, tl.program_id(0), BINS, SPAN
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
        seen = (mel_row >= 0) & (mel_row < length) & (mel_column >= 0) & (k < 9)
        top = begin // WIDTH
        at = x + (mel_begin + 2 * top) * BINS + ((mel_row - 2 * top) * BINS + mel_column)
        values = tl.load(at, mask=real & seen, other=0.0)
        values = tl.where(real & (k == 9), 1.0, values).to(values.dtype)
        to = patches + (4 * first + begin) * 16 + (n[:, None] * 16 + k)
        tl.store(to, values, mask=inside)


@triton.jit
def _patch(patches, row, column, inside, TAP: tl.constexpr, BINS: tl.constexpr):
    """Load the patches of one tap of the second convolution, (BLOCK_P, 16).

    Args:
        patches: Pointers to the patch of row ``2 r``, column ``2 f`` for each place (r, f).
        row: r, (BLOCK_P,).
        column: f, (BLOCK_P,).
        inside: Mask of valid places, (BLOCK_P,).
        TAP: Index of the tap, in row-major order.
        BINS: F.
    """
    seen = inside
    if TAP < 3:
        seen = seen & (row > 0)
    if TAP % 3 == 0:
        seen = seen & (column > 0)
    shift = ((TAP // 3 - 1) * (BINS // 2) + TAP % 3 - 1) * 16
    at = patches[:, None] + (shift + tl.arange(0, 16)[None, :])
    return tl.load(at, mask=seen[:, None], other=0.0)


@triton.jit
def _filters(weight, bias, c, CHANNELS: tl.constexpr):
    """Load weights and bias of the first convolution in the order of `_patch`, (BLOCK_C, 16)."""
    k = tl.arange(0, 16)[None, :]
    known = (c < CHANNELS)[:, None]
    weights = tl.load(weight + c[:, None] * 9 + k, mask=known & (k < 9), other=0.0)
    biases = tl.load(bias + c[:, None] + 0 * k, mask=known & (k == 9), other=0.0)
    return weights + biases


@triton.jit(do_not_specialize=["sequences", "places"])
def stem_forward(
    patches,
    weight,
    bias,
    taps,
    offset,
    cu_places,
    lengths,
    y,
    sequences,
    places,
    BINS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Compute one span of places and one block of channels; program (span, block).

    Channels are the rows of every product, so that a thread holds few of them and their taps stay
    in registers.

    Args:
        patches: (s T / 2, F / 2, 16), contiguous.
        weight: (C, 9), weights of the first convolution.
        bias: (C,), bias of the first convolution.
        taps: (C, 9), weights of the second convolution.
        offset: (C,), bias of the second convolution.
        cu_places: int32 (N + 1,), offsets of the places of each utterance.
        lengths: (N,), mel rows of each utterance.
        y: (s T / 4, F / 4, C), contiguous, written; zero in rows past the length.
        sequences: N.
        places: s T / 4 times F / 4.
        BINS: F.
        CHANNELS: C.
        BLOCK_P: Places of a tile.
        BLOCK_C: Channels of a tile.
        SPAN: Places of a program, a multiple of BLOCK_P.
    """
    first, count, start, length, _ = _find_places(
        cu_places, lengths, sequences, places, tl.program_id(0), BINS, SPAN
    )
    if start >= count:
        return
    WIDTH: tl.constexpr = BINS // 4
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = c < CHANNELS
    filters = _filters(weight, bias, c, CHANNELS)
    shift = tl.load(offset + c, mask=known, other=0.0).to(tl.float32)
    n = tl.arange(0, BLOCK_P)
    # The loop starts at 0 because the compiler loses all alignments if it starts at a loaded value.
    for done in range(0, tl.minimum(SPAN, count - start), BLOCK_P):
        begin = start + done
        p = begin + n
        row = p // WIDTH
        column = p % WIDTH
        inside = (p < count) & (4 * row < length)
        top = begin // WIDTH
        here = patches + (4 * first + top * BINS) * 16 + ((row - top) * BINS + 2 * column) * 16
        acc = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
        for tap in tl.static_range(9):
            patch = _patch(here, row, column, inside, tap, BINS)
            z = tl.dot(filters, tl.trans(patch), input_precision="ieee")
            z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
            w = tl.load(taps + c * 9 + tap, mask=known, other=0.0).to(tl.float32)
            acc += z * w[:, None]
        acc = tl.where(inside[None, :], acc + shift[:, None], 0.0)
        to = y + (first + begin) * CHANNELS + (n[None, :] * CHANNELS + c[:, None])
        tl.store(to, acc.to(y.dtype.element_ty), mask=(p < count)[None, :] & known[:, None])


@triton.jit
def _gathered(
    seen, patches, row, column, inside, filters, grad, TAP: tl.constexpr, BINS: tl.constexpr
):
    """Add the weighted patches of one tap where the first convolution is positive.

    Args:
        seen: (BLOCK_C, 16), the sum so far.
        patches: Pointers as for `_patch`, (BLOCK_P,).
        row: r, (BLOCK_P,).
        column: f, (BLOCK_P,).
        inside: Mask of valid places, (BLOCK_P,).
        filters: Result of `_filters`, (BLOCK_C, 16).
        grad: Gradient of the result, the weight of each place, (BLOCK_C, BLOCK_P).
        TAP: Index of the tap, in row-major order.
        BINS: F.
    """
    patch = _patch(patches, row, column, inside, TAP, BINS)
    z = tl.dot(filters, tl.trans(patch), input_precision="ieee")
    passed = tl.where(z > 0, grad, 0.0).to(grad.dtype)
    return tl.dot(passed, patch, acc=seen, input_precision="ieee")


@triton.jit
def _finish(seen, filters, taps, c, to, TAP: tl.constexpr, CHANNELS: tl.constexpr):
    """Store the gradient of one tap of the second convolution.

    Returns:
        Contribution of this tap to the gradients of the first convolution, (BLOCK_C, 16).
    """
    known = c < CHANNELS
    tl.store(to + 10 * CHANNELS + c * 9 + TAP, tl.sum(seen * filters.to(tl.float32), 1), mask=known)
    w = tl.load(taps + c * 9 + TAP, mask=known, other=0.0).to(tl.float32)
    return seen * w[:, None]


@triton.jit(do_not_specialize=["sequences", "places", "spans"])
def stem_backward(
    patches,
    weight,
    bias,
    taps,
    cu_places,
    lengths,
    grad_y,
    partials,
    sequences,
    places,
    spans,
    BINS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPAN: tl.constexpr,
):
    r"""Compute gradients of a block of channels; program (i, block) of n takes spans i, i + n...

    All gradients follow from one sum for each tap (i, j) of the second convolution,

    .. math:: D_{ij,ck} = \sum_{rf} g_{rfc} \, [z_{2r+i-1,\,2f+j-1,\,c} > 0] \, P_{ij,rfk}

    with the patches P of mel values and the first convolution z. The gradient of the weights of the
    first convolution is :math:`\sum_{ij} w'_{c,ij} D_{ij,ck}`, that of a tap
    :math:`\sum_k w_{ck} D_{ij,ck}`. No factor of the product is rounded, because each gradient is
    either used unchanged or masked.

    Args:
        patches: (s T / 2, F / 2, 16), contiguous.
        weight: (C, 9), weights of the first convolution.
        bias: (C,), bias of the first convolution.
        taps: (C, 9), weights of the second convolution.
        cu_places: int32 (N + 1,), offsets of the places of each utterance.
        lengths: (N,), mel rows of each utterance.
        grad_y: (s T / 4, F / 4, C), contiguous.
        partials: float32 (programs, 20 C), contiguous, written: gradients of the weight (C, 9), the
            bias (C,), the taps (C, 9) and their bias (C,).
        sequences: N.
        places: s T / 4 times F / 4.
        spans: Number of spans.
        BINS: F.
        CHANNELS: C.
        BLOCK_P: Places of a tile.
        BLOCK_C: Channels of a tile.
        SPAN: Places of a span, a multiple of BLOCK_P.
    """
    WIDTH: tl.constexpr = BINS // 4
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = c < CHANNELS
    filters = _filters(weight, bias, c, CHANNELS)
    n = tl.arange(0, BLOCK_P)
    # Sums over places are products with ones; reductions would exchange values at every step.
    ones = tl.full((BLOCK_P, 16), 1.0, patches.dtype.element_ty)
    total = tl.zeros((BLOCK_C, 16), tl.float32)
    d0 = tl.zeros((BLOCK_C, 16), tl.float32)
    d1 = tl.zeros((BLOCK_C, 16), tl.float32)
    d2 = tl.zeros((BLOCK_C, 16), tl.float32)
    d3 = tl.zeros((BLOCK_C, 16), tl.float32)
    d4 = tl.zeros((BLOCK_C, 16), tl.float32)
    d5 = tl.zeros((BLOCK_C, 16), tl.float32)
    d6 = tl.zeros((BLOCK_C, 16), tl.float32)
    d7 = tl.zeros((BLOCK_C, 16), tl.float32)
    d8 = tl.zeros((BLOCK_C, 16), tl.float32)
    for span in range(tl.program_id(0), spans, tl.num_programs(0)):
        first, count, start, length, _ = _find_places(
            cu_places, lengths, sequences, places, span, BINS, SPAN
        )
        for done in range(0, tl.minimum(SPAN, count - start), BLOCK_P):
            begin = start + done
            p = begin + n
            row = p // WIDTH
            column = p % WIDTH
            inside = (p < count) & (4 * row < length)
            top = begin // WIDTH
            here = patches + (4 * first + top * BINS) * 16 + ((row - top) * BINS + 2 * column) * 16
            at = grad_y + (first + begin) * CHANNELS + (n[None, :] * CHANNELS + c[:, None])
            g = tl.load(at, mask=inside[None, :] & known[:, None], other=0.0)
            total = tl.dot(g, ones, acc=total, input_precision="ieee")
            d0 = _gathered(d0, here, row, column, inside, filters, g, 0, BINS)
            d1 = _gathered(d1, here, row, column, inside, filters, g, 1, BINS)
            d2 = _gathered(d2, here, row, column, inside, filters, g, 2, BINS)
            d3 = _gathered(d3, here, row, column, inside, filters, g, 3, BINS)
            d4 = _gathered(d4, here, row, column, inside, filters, g, 4, BINS)
            d5 = _gathered(d5, here, row, column, inside, filters, g, 5, BINS)
            d6 = _gathered(d6, here, row, column, inside, filters, g, 6, BINS)
            d7 = _gathered(d7, here, row, column, inside, filters, g, 7, BINS)
            d8 = _gathered(d8, here, row, column, inside, filters, g, 8, BINS)
    to = partials + tl.program_id(0).to(tl.int64) * (CHANNELS * 20)
    grads = _finish(d0, filters, taps, c, to, 0, CHANNELS)
    grads += _finish(d1, filters, taps, c, to, 1, CHANNELS)
    grads += _finish(d2, filters, taps, c, to, 2, CHANNELS)
    grads += _finish(d3, filters, taps, c, to, 3, CHANNELS)
    grads += _finish(d4, filters, taps, c, to, 4, CHANNELS)
    grads += _finish(d5, filters, taps, c, to, 5, CHANNELS)
    grads += _finish(d6, filters, taps, c, to, 6, CHANNELS)
    grads += _finish(d7, filters, taps, c, to, 7, CHANNELS)
    grads += _finish(d8, filters, taps, c, to, 8, CHANNELS)
    k = tl.arange(0, 16)[None, :]
    place = tl.where(k < 9, c[:, None] * 9 + k, 9 * CHANNELS + c[:, None])
    tl.store(to + place, grads, mask=known[:, None] & (k < 10))
    # All 16 columns are equal.
    tl.store(to + 19 * CHANNELS + c, tl.sum(total, 1) / 16, mask=known)
