"""`projected_top_k` in Triton.

Up to about 200 rows the time is the time to read the weight once, V C b bytes with element size b;
for more rows the products take longer. For the 5,248 classes and 1,024 channels of canary_1b_flash
in bfloat16 the weight is 10.7 MB, which takes 2.3 us at the 4.8 TB/s of an H200. Storing and
loading float32 logits would move only 0.7 MB for 32 rows; for few rows the number of launches, two,
matters more.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.projected_top_k import TopKArguments
from effasr_kernels.runtime.launch import ceil_div, launch, multiprocessors

_BLOCK = 1024
_PROGRAMS = 2
"""Programs per multiprocessor; one loads while the other selects."""


@dataclass(frozen=True, slots=True)
class Config:
    """Rows, classes and channels of a tile, number of warps and of pipeline stages."""

    block_r: int
    block_v: int
    block_c: int
    warps: int
    stages: int


def config(dtype: torch.dtype, rows: int) -> Config:
    """Return the configuration for a dtype and for few or many rows."""
    # Loads of the weight limit the speed. Its tiles are small, so that all multiprocessors load,
    # with deep prefetching.
    block_r = 16 if rows <= 16 else 64
    if dtype == torch.float32:
        # Without tensor cores: their TF32 has 11 bits of precision.
        return Config(block_r, 32, 32, 4, 2)
    return Config(block_r, 32, 128, 4, 4)


def divide(rows: int, classes: int, choice: Config, processors: int) -> tuple[int, int]:
    """Return the number of vocabulary tiles per part and of parts."""
    # They depend only on the shapes and the GPU.
    tiles = ceil_div(classes, choice.block_v)
    parts = max(1, _PROGRAMS * processors // max(1, ceil_div(rows, choice.block_r)))
    per_split = -(-tiles // min(parts, tiles))
    return per_split, ceil_div(tiles, per_split)


def run(a: TopKArguments) -> tuple[Tensor, Tensor]:
    hidden, k, classes, (rows, width) = a.hidden, a.k, a.classes, a.hidden.shape
    log_probs = hidden.new_empty(rows, k, dtype=torch.float32)
    indices = hidden.new_empty(rows, k, dtype=torch.int64)
    choice = config(hidden.dtype, rows)
    per_split, splits = divide(rows, classes, choice, multiprocessors(hidden.device))
    hidden, weight = (x if x.stride(1) == 1 else x.contiguous() for x in (hidden, a.weight))
    bias = None if a.bias is None else a.bias.contiguous()
    partial = hidden.new_empty(splits, rows, k, dtype=torch.int64)
    statistics = hidden.new_empty(2, splits, rows, dtype=torch.float32)
    block_k = 1 << (k - 1).bit_length()
    launch(
        rank_parts,
        (splits if rows else 0, ceil_div(rows, choice.block_r)),
        *(hidden, weight, bias, partial, statistics, rows, classes),
        *(hidden.stride(0), weight.stride(0), per_split),
        num_warps=choice.warps,
        num_stages=choice.stages,
        K=k,
        BLOCK_K=block_k,
        WIDTH=width,
        BLOCK_R=choice.block_r,
        BLOCK_V=choice.block_v,
        BLOCK_C=choice.block_c,
    )
    launch(
        merge_parts,
        (rows,),
        *(partial, statistics, log_probs, indices, rows, splits),
        num_warps=4,
        num_stages=1,
        K=k,
        BLOCK_K=block_k,
        BLOCK=_BLOCK,
    )
    return log_probs, indices


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
    ordered = (ranked >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def class_of(ranked):
    """Return the class that `rank` encoded, int64."""
    return 0x7FFFFFFF - (ranked & 0x7FFFFFFF)


@triton.jit
def nothing_yet(K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return K distinct initial values for each row, (BLOCK_R, BLOCK_K), below all logits."""
    i = tl.arange(0, BLOCK_K)[None, :].to(tl.int64)
    # Entries past K are never the minimum, so they are never replaced.
    initial = tl.where(i < K, i + _LOWEST + 1, 0x7FFFFFFFFFFFFFFF)
    return initial + tl.zeros((BLOCK_R, BLOCK_K), tl.int64)


@triton.jit
def take(best_classes, ranked):
    """Return the K best of two, (BLOCK_R, BLOCK_K), unsorted, and (BLOCK_R, n)."""
    lowest = tl.min(best_classes, 1)
    best = tl.max(ranked, 1)
    # After the first tiles few candidates are better than the kept ones, so iterations are few.
    while tl.max((best > lowest).to(tl.int32), 0) > 0:
        replaced = (best_classes == lowest[:, None]) & (best > lowest)[:, None]
        best_classes = tl.where(replaced, best[:, None], best_classes)
        ranked = tl.where(ranked == best[:, None], _LOWEST, ranked)
        lowest = tl.min(best_classes, 1)
        best = tl.max(ranked, 1)
    return best_classes


@triton.jit(do_not_specialize=["rows", "tiles_per_split"])
def rank_parts(
    hidden,  # (N, C), with contiguous rows
    weight,  # (V, C), with contiguous rows
    bias,  # (V,), contiguous, or None
    partial,  # int64 (splits, N, K), contiguous, written: the encoded best classes, unsorted
    statistics,  # float32 (2, splits, N), written: the part's largest logit, sum of exponentials
    rows,  # N
    count,  # V', number of classes to use
    hidden_stride,
    weight_stride,
    tiles_per_split,  # tiles of the vocabulary in a part
    K: tl.constexpr,  # k
    BLOCK_K: tl.constexpr,  # k rounded up to a power of two
    WIDTH: tl.constexpr,  # C
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Select the best classes of a tile of rows in one part of the vocabulary."""
    # Program (part, tile).
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
    best_classes = nothing_yet(K, BLOCK_R, BLOCK_K)
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
        best_classes = take(best_classes, ranked)
        z = tl.where((v < count)[None, :], z, float("-inf"))
        larger = tl.maximum(largest, tl.max(z, 1))
        # If all logits so far are -inf, their difference to the maximum would be NaN.
        pivot = tl.where(larger == float("-inf"), 0.0, larger)
        mass = mass * tl.exp(largest - pivot) + tl.sum(tl.exp(z - pivot[:, None]), 1)
        largest = larger

    row = first_row + in_rows
    index = part.to(tl.int64) * rows + row
    i = tl.arange(0, BLOCK_K)
    stored = (row < rows)[:, None] & (i < K)[None, :]
    tl.store(partial + index[:, None] * K + i[None, :], best_classes, mask=stored)
    tl.store(statistics + index, largest, mask=row < rows)
    statistics += tl.num_programs(0).to(tl.int64) * rows
    tl.store(statistics + index, mass, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "splits"])
def merge_parts(
    partial,  # int64 (splits, N, K), contiguous
    statistics,  # float32 (2, splits, N), contiguous
    log_probs,  # float32 (N, K), contiguous, written
    indices,  # int64 (N, K), contiguous, written
    rows,  # N
    splits,  # parts of the vocabulary
    K: tl.constexpr,  # k
    BLOCK_K: tl.constexpr,  # k rounded up to a power of two
    BLOCK: tl.constexpr,
):
    """Merge the parts of a row and sort its best classes; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    masses = statistics + splits.to(tl.int64) * rows
    largest = tl.full((1,), float("-inf"), tl.float32)
    mass = tl.zeros((1,), tl.float32)
    for first in range(0, splits, BLOCK):
        index = (first + j).to(tl.int64) * rows + row
        real = first + j < splits
        tops = tl.load(statistics + index, mask=real, other=float("-inf"))
        part = tl.load(masses + index, mask=real, other=0.0)
        larger = tl.maximum(largest, tl.max(tops, 0))
        pivot = tl.where(larger == float("-inf"), 0.0, larger)
        mass = mass * tl.exp(largest - pivot) + tl.sum(part * tl.exp(tops - pivot), 0)
        largest = larger

    best_classes = nothing_yet(K, 1, BLOCK_K)
    for first in range(0, splits * K, BLOCK):
        index = ((first + j) // K).to(tl.int64) * rows + row
        real = first + j < splits * K
        ranked = tl.load(partial + index * K + (first + j) % K, mask=real, other=_LOWEST)
        best_classes = take(best_classes, ranked[None, :])

    i = tl.arange(0, BLOCK_K)
    best_classes = tl.where((i < K)[None, :], best_classes, _LOWEST)
    for position in tl.static_range(K):
        best = tl.max(best_classes, 1)
        best_classes = tl.where(best_classes == best[:, None], _LOWEST, best_classes)
        log_prob = logit_of(best) - largest - tl.log(mass)
        lane = tl.arange(0, 1)
        tl.store(log_probs + row * K + position + lane, log_prob)
        tl.store(indices + row * K + position + lane, class_of(best))
