"""Kernels that select the best classes of each row from tiles of logits in registers.

A logit and its class are encoded in one 64-bit integer, which is larger for a larger logit and, for
equal logits, for the lower class. All integers of a row differ, so maxima suffice to select the
best.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-(2**63))


@triton.jit
def rank(logits, classes):
    """Encode float32 logits and their classes as int64; the two are broadcast."""
    # Minus zero must equal zero.
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    # The bits of negative floats, read as integers, are in reverse order.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - classes).to(tl.int64)


@triton.jit
def logit_of(ranked):
    """Return the logit that `rank` encoded."""
    ordered = (ranked >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def class_of(ranked):
    """Return the class that `rank` encoded, int64."""
    return 0x7FFFFFFF - (ranked & 0x7FFFFFFF)


@triton.jit
def nothing_yet(K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return K distinct initial values for each row, (BLOCK_R, BLOCK_K), below those of logits."""
    i = tl.arange(0, BLOCK_K)[None, :].to(tl.int64)
    # Entries past K are never the minimum, so they are never replaced.
    places = tl.where(i < K, i + _LOWEST + 1, 0x7FFFFFFFFFFFFFFF)
    return places + tl.zeros((BLOCK_R, BLOCK_K), tl.int64)


@triton.jit
def take(kept, ranked):
    """Return the K best of ``kept``, (BLOCK_R, BLOCK_K), unsorted, and ``ranked``, (BLOCK_R, n)."""
    lowest = tl.min(kept, 1)
    best = tl.max(ranked, 1)
    # After the first tiles few candidates are better than the kept ones, so iterations are few.
    while tl.max((best > lowest).to(tl.int32), 0) > 0:
        replaced = (kept == lowest[:, None]) & (best > lowest)[:, None]
        kept = tl.where(replaced, best[:, None], kept)
        ranked = tl.where(ranked == best[:, None], _LOWEST, ranked)
        lowest = tl.min(kept, 1)
        best = tl.max(ranked, 1)
    return kept


@triton.jit(do_not_specialize=["rows", "tiles_per_split"])
def rank_parts(
    hidden,
    weight,
    bias,
    partial,
    statistics,
    rows,
    count,
    hidden_stride,
    weight_stride,
    tiles_per_split,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Select the best classes of a tile of rows in one part of the vocabulary.

    Program (part, tile).

    Args:
        hidden: (N, C), with contiguous rows.
        weight: (V, C), with contiguous rows.
        bias: (V,), contiguous, or None.
        partial: int64 (splits, N, K), contiguous, written: the encoded best classes, unsorted.
        statistics: float32 (2, splits, N), contiguous, written: the largest logit of the part and
            the sum of exponentials relative to it.
        rows: N.
        count: V', number of classes to use.
        hidden_stride: Row stride of ``hidden`` in elements.
        weight_stride: Row stride of ``weight`` in elements.
        tiles_per_split: Tiles of the vocabulary in a part.
        K: k.
        BLOCK_K: k rounded up to a power of two.
        WIDTH: C.
        BLOCK_R: Rows of a tile.
        BLOCK_V: Classes of a tile.
        BLOCK_C: Channels of a tile.
    """
    part = tl.program_id(0)
    first_row = tl.program_id(1) * BLOCK_R
    in_rows = tl.arange(0, BLOCK_R)
    in_classes = tl.arange(0, BLOCK_V)
    in_width = tl.arange(0, BLOCK_C)
    # Indices past the end are clamped to the last row or class; their results are discarded.
    h_tile = hidden + first_row.to(tl.int64) * hidden_stride + in_width[None, :]
    h_tile += tl.minimum(in_rows, rows - 1 - first_row)[:, None] * hidden_stride
    largest = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_R,), tl.float32)
    kept = nothing_yet(K, BLOCK_R, BLOCK_K)
    begin = part * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, tl.cdiv(count, BLOCK_V))
    for tile in range(begin, end):
        first_class = tile * BLOCK_V
        v = first_class + in_classes
        w_tile = weight + first_class.to(tl.int64) * weight_stride + in_width[None, :]
        w_tile += tl.minimum(in_classes, count - 1 - first_class)[:, None] * weight_stride
        z = tl.zeros((BLOCK_R, BLOCK_V), tl.float32)
        for c in range(0, WIDTH, BLOCK_C):
            if WIDTH % BLOCK_C == 0:
                h = tl.load(h_tile + c)
                w = tl.load(w_tile + c)
            else:
                h = tl.load(h_tile + c, mask=(c + in_width < WIDTH)[None, :], other=0.0)
                w = tl.load(w_tile + c, mask=(c + in_width < WIDTH)[None, :], other=0.0)
            z = tl.dot(h, tl.trans(w), z, input_precision="ieee")
        if bias is not None:
            z += tl.load(bias + v, mask=v < count, other=0.0).to(tl.float32)[None, :]
        ranked = tl.where((v < count)[None, :], rank(z, v[None, :]), _LOWEST)
        kept = take(kept, ranked)
        z = tl.where((v < count)[None, :], z, float("-inf"))
        larger = tl.maximum(largest, tl.max(z, 1))
        # If all logits so far are -inf, their difference to the maximum would be NaN.
        pivot = tl.where(larger == float("-inf"), 0.0, larger)
        mass = mass * tl.exp(largest - pivot) + tl.sum(tl.exp(z - pivot[:, None]), 1)
        largest = larger

    row = first_row + in_rows
    place = part.to(tl.int64) * rows + row
    i = tl.arange(0, BLOCK_K)
    stored = (row < rows)[:, None] & (i < K)[None, :]
    tl.store(partial + place[:, None] * K + i[None, :], kept, mask=stored)
    tl.store(statistics + place, largest, mask=row < rows)
    statistics += tl.num_programs(0).to(tl.int64) * rows
    tl.store(statistics + place, mass, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "splits"])
def merge_parts(
    partial,
    statistics,
    log_probs,
    indices,
    rows,
    splits,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge the parts of a row and sort its best classes; one program per row.

    Args:
        partial: int64 (splits, N, K), contiguous.
        statistics: float32 (2, splits, N), contiguous.
        log_probs: float32 (N, K), contiguous, written.
        indices: int64 (N, K), contiguous, written.
        rows: N.
        splits: Parts of the vocabulary.
        K: k.
        BLOCK_K: k rounded up to a power of two.
        BLOCK: Elements loaded at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    masses = statistics + splits.to(tl.int64) * rows
    largest = tl.full((1,), float("-inf"), tl.float32)
    mass = tl.zeros((1,), tl.float32)
    for first in range(0, splits, BLOCK):
        place = (first + j).to(tl.int64) * rows + row
        real = first + j < splits
        tops = tl.load(statistics + place, mask=real, other=float("-inf"))
        part = tl.load(masses + place, mask=real, other=0.0)
        larger = tl.maximum(largest, tl.max(tops, 0))
        pivot = tl.where(larger == float("-inf"), 0.0, larger)
        mass = mass * tl.exp(largest - pivot) + tl.sum(part * tl.exp(tops - pivot), 0)
        largest = larger

    kept = nothing_yet(K, 1, BLOCK_K)
    for first in range(0, splits * K, BLOCK):
        place = ((first + j) // K).to(tl.int64) * rows + row
        real = first + j < splits * K
        ranked = tl.load(partial + place * K + (first + j) % K, mask=real, other=_LOWEST)
        kept = take(kept, ranked[None, :])

    i = tl.arange(0, BLOCK_K)
    kept = tl.where((i < K)[None, :], kept, _LOWEST)
    for place in tl.static_range(K):
        best = tl.max(kept, 1)
        kept = tl.where(kept == best[:, None], _LOWEST, kept)
        log_prob = logit_of(best) - largest - tl.log(mass)
        one = tl.arange(0, 1)
        tl.store(log_probs + row * K + place + one, log_prob)
        tl.store(indices + row * K + place + one, class_of(best))
