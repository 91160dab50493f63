"""The stem on tensor cores: the first convolution is computed anew for each of nine taps.

A number of the first convolution enters up to four results, 9 / 4 in the mean. A program that kept
it would have to exchange it between threads; on tensor cores it costs less to compute it anew, with
its nine weights and its bias padded to the 16 of one instruction. What it multiplies comes from
memory as patches of 16 numbers, made beforehand, zeros where a row is not real: with the masks of
two layers applied once, a tap is one load. That is a sixteenth of the activation of 256 channels.

For each result this is 9 x 16 multiply-adds on tensor cores, and 9 x 2 instructions on the others
(forward: zero if negative, multiply-add; backward: compare, select). Without tensor cores the
forward alone would be 90, and the loads of the patches.
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
    """Find a span of places, each a row and a column of the result, within one utterance.

    Returns:
        The utterance's first place, int64; how many it has; the span's first; real mel rows, 0 in
        the tail; the row of ``x`` where the utterance begins, int64.
    """
    sequence, first, count, start = find_tile(cu_places, sequences, places, tile, SPAN)
    length = tl.load(lengths + sequence, mask=sequence < sequences, other=0).to(tl.int32)
    # A row of BINS / 4 places stands for 4 mel rows.
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
    """What the first convolution multiplies, at each of its places: program (span of the result).

    Of the 16 numbers, nine are mel values, the next is a one for the bias, the others are zeros.
    All are zeros where the row is not real, so that the convolution is, too.

    Args:
        x: (s T, F), a pointer, as are all up to ``patches``, and contiguous.
        cu_places: int32 (N + 1,), where the places of the result of each utterance begin.
        lengths: (N,), real mel rows.
        patches: (s T / 2, F / 2, 16), the dtype of ``x``, written but for the tail.
        sequences: N.
        places: s T / 4 times F / 4, a quarter of the first convolution's.
        BINS: F.
        BLOCK_Q: Places of a tile, of the first convolution.
        SPAN: Places of a program, of the result.
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
    """The patches that one tap of the second convolution sees: (BLOCK_P, 16).

    Args:
        patches: Pointers to that of row ``2 r``, column ``2 f``, for each place (r, f).
        row: r, (BLOCK_P,).
        column: f, (BLOCK_P,).
        inside: Which places are wanted, (BLOCK_P,).
        TAP: Number of the tap, row by row.
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
    """Weights and bias of the first convolution, as `_patch` has its factors: (BLOCK_C, 16)."""
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
    """One span of places and one block of channels: program (span, block).

    Channels are the rows of every product, so that a thread holds few of them, and their taps stay
    in registers.

    Args:
        patches: (s T / 2, F / 2, 16), a pointer, as are all up to ``y``, and contiguous.
        weight: (C, 9), of the first convolution.
        bias: (C,).
        taps: (C, 9), of the second.
        offset: (C,), its bias.
        cu_places: int32 (N + 1,), where the places of each utterance begin.
        lengths: (N,), real mel rows.
        y: (s T / 4, F / 4, C), written; zeros where a row is not real.
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
    # From 0: of a loop that begins at a number from memory, the compiler forgets all alignments.
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
    """Sum the patches that one tap sees, where the first convolution is positive.

    Args:
        seen: (BLOCK_C, 16), what to add to.
        patches: As for `_patch`, and so are all up to ``inside``.
        row: r.
        column: f.
        inside: Which places are wanted.
        filters: From `_filters`.
        grad: Of the result, by which each place is weighted: (BLOCK_C, BLOCK_P).
        TAP: Number of the tap.
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
        What this tap adds to the gradients of the first: (BLOCK_C, 16).
    """
    known = c < CHANNELS
    tl.store(to + c * 20 + 10 + TAP, tl.sum(seen * filters.to(tl.float32), 1), mask=known)
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
    r"""Every n-th span and one block of channels: program (n-th, block).

    All gradients come from one sum for each tap (i, j) of the second convolution,

    .. math:: D_{ij,ck} = \sum_{rf} g_{rfc} \, [z_{2r+i-1,\,2f+j-1,\,c} > 0] \, P_{ij,rfk}

    with the patches P of mel values and the first convolution z: of the first convolution's weights
    that is :math:`\sum_{ij} w'_{c,ij} D_{ij,ck}`, of a tap :math:`\sum_k w_{ck} D_{ij,ck}`. No
    factor of the product is rounded, since a gradient is either taken as it is or left out.

    Args:
        patches: (s T / 2, F / 2, 16), a pointer, as are all up to ``partials``, and contiguous.
        weight: (C, 9), of the first convolution.
        bias: (C,).
        taps: (C, 9), of the second.
        cu_places: int32 (N + 1,), where the places of each utterance begin.
        lengths: (N,), real mel rows.
        grad_y: (s T / 4, F / 4, C).
        partials: float32 (programs, C, 20), written: of each channel the gradients of the nine
            weights, the bias, the nine taps and their bias.
        sequences: N.
        places: s T / 4 times F / 4.
        spans: How many spans there are.
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
    # Sums over places are products with ones: others have threads exchange numbers at every step.
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
    tl.store(to + c[:, None] * 20 + k, grads, mask=known[:, None] & (k < 10))
    # All 16 columns are equal.
    tl.store(to + c * 20 + 19, tl.sum(total, 1) / 16, mask=known)
