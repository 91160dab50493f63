"""`decode_attention` in Triton.

The time is bounded by reading the keys and values once: 2 L Hk D b bytes for each sequence, with b
the bytes of an element. For 32 sequences of 375 keys (30 s, 8x subsampled) of canary_1b_flash (a
decoder with 4 layers of 8 heads of 128 channels), that is 49 MB for each layer and token in
bfloat16, or 10 us at the 4.8 TB/s of an H200; the 1.5 MFLOP of each query are negligible.
"""

# pyright: reportGeneralTypeIssues=false
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.decode_attention import DecodeArguments
from effasr_kernels.runtime.launch import ceil_div, launch, multiprocessors, unit_stride
from effasr_kernels.shared.paged import refuse_pages

_WIDEST = 256
_BLOCK_G = 16
"""Queries and heads that share a load: the rows of one matrix instruction."""
_KEYS_PER_SPLIT = 256
"""Minimum keys of a split: dividing fewer saves less time than merging costs."""
_MOST_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Config:
    """Keys of a tile, warps, and pipeline stages of the loads."""

    block_n: int
    warps: int
    stages: int


def config(dtype: torch.dtype, width: int, *, shared: bool) -> Config:
    """Select by dtype, padded D, and whether queries share loads; not by length."""
    single = dtype == torch.float32
    if not shared:
        return Config(16 if width > 128 else 32, 4, 2 if single else 3)
    if single:
        # Without tensor cores: their TF32 has only 11 bits of precision.
        return Config(32 if width <= 64 else 16, 4, 2)
    return Config(64 if width <= 64 else 32, 4, 2 if width > 128 else 3)


def default_splits(columns: int, size: int, key_heads: int, processors: int) -> int:
    """Number of parts of the keys, so that one sequence can fill a GPU; independent of N."""
    useful = -(-columns * size // _KEYS_PER_SPLIT)
    return max(1, min(useful, 2 * processors // max(1, key_heads), _MOST_SPLITS))


def unsupported_reason(a: DecodeArguments) -> str | None:
    if a.q.shape[2] > _WIDEST:
        return f"supports head widths up to {_WIDEST}, not {a.q.shape[2]}"
    return refuse_pages(a.k_pages, a.v_pages)


def run(a: DecodeArguments) -> Tensor:
    q, splits = a.q, a.splits
    out = q.new_empty(q.shape)
    if not q.numel():
        return out
    count, heads, width = q.shape
    if splits is None:
        columns, (size, key_heads) = a.page_table.shape[1], a.k_pages.shape[1:3]
        splits = default_splits(columns, size, key_heads, multiprocessors(q.device))
    if splits == 1:
        _attend(a, out, None, None, splits)
        return out
    partial = q.new_empty(splits, count, heads, width, dtype=torch.float32)
    statistics = q.new_empty(2, splits, count, heads, dtype=torch.float32)
    _attend(a, None, partial, statistics, splits)
    launch(
        merge_parts,
        (count * heads,),
        *(partial, statistics, out, splits, count * heads),
        num_warps=4,
        num_stages=1,
        WIDTH=width,
        BLOCK_D=_padded(width),
        BLOCK_S=min(_MOST_SPLITS, 1 << (splits - 1).bit_length()),
    )
    return out


def _attend(
    a: DecodeArguments,
    out: Tensor | None,
    partial: Tensor | None,
    statistics: Tensor | None,
    splits: int,
) -> None:
    """Launch the kernel that writes ``out``, or ``partial`` and ``statistics``."""
    q = unit_stride(a.q)
    new_k, new_v = (None if x is None else unit_stride(x) for x in (a.new_k, a.new_v))
    k_pages, v_pages, page_table = a.k_pages, a.v_pages, a.page_table
    (count, heads, width), (sequences, columns) = q.shape, page_table.shape
    (pages, size, key_heads), block_d = k_pages.shape[:3], _padded(width)
    hypotheses, share = count // sequences, heads // key_heads
    group = hypotheses * share
    # float32 has no matrix instructions, and wide heads would need too many registers per thread.
    shared = group > 1 and not (q.dtype == torch.float32 and block_d > 128)
    choice = config(q.dtype, block_d, shared=shared)
    tensors = q, k_pages, v_pages, page_table, a.lengths.contiguous()
    written = out, partial, statistics
    sizes = splits, pages, size, columns, *page_table.stride(), count, heads
    strides = *q.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3]
    new = new_k, new_v
    new_strides = [n for x in new for n in ((0, 0) if x is None else x.stride()[:2])]
    grid = (sequences * key_heads, splits, ceil_div(group, _BLOCK_G))
    launch(
        attend_several if shared else attend_one,
        grid if shared else (count * heads, splits),
        *(*tensors, *new, *written, *sizes, *strides, *new_strides, a.scale * math.log2(math.e)),
        num_warps=choice.warps,
        num_stages=choice.stages,
        **({"BLOCK_G": _BLOCK_G} if shared else {"STAGES": choice.stages}),
        GROUP=group if shared else hypotheses,
        SHARE=share,
        WIDTH=width,
        BLOCK_D=block_d,
        BLOCK_N=choice.block_n,
        WITHIN=size % choice.block_n == 0,
        MERGED=out is None,
    )


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


@triton.jit(
    do_not_specialize=["splits", "pages", "size", "columns", "table_row", "table_column", "rows"]
)
def attend_one(
    q,  # (N, H, D), channels contiguous as in all; pointers up to ``statistics``
    k_pages,  # (P, B, Hk, D), written to where there is `new_k`
    v_pages,  # likewise
    page_table,  # int32 (S, M)
    lengths,  # int32 (S,), contiguous
    new_k,  # (N, Hk, D), N = S, the last key; None if all keys are in pages
    new_v,  # likewise
    out,  # (N, H, D), contiguous, written; None with `MERGED`
    # float32 (splits, N, H, D), contiguous, written: sums of values, weighted by powers of two
    # relative to the largest score; None unless ``MERGED``
    partial,
    statistics,  # float32 (2, splits, N, H), written: largest score, sum; None unless ``MERGED``
    splits,  # parts of the keys
    pages,  # P
    size,  # B
    columns,  # M
    table_row,
    table_column,
    rows,  # N
    heads,  # H
    q_row,
    q_head,
    k_page,  # from one page of `k_pages` to the next
    k_key,  # from one key to the next
    k_head,
    v_page,
    v_key,
    v_head,
    new_k_row,
    new_k_head,
    new_v_row,
    new_v_head,
    scale_log2,  # factor of the scores, for powers of two
    GROUP: tl.constexpr,  # N / S, queries of a sequence
    SHARE: tl.constexpr,  # H / Hk, heads of queries that share a head of keys
    WIDTH: tl.constexpr,  # D
    BLOCK_D: tl.constexpr,  # the power of two, at least 16, that D is padded to
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,  # stages of the pipeline of loads
    WITHIN: tl.constexpr,  # whether a tile lies within one page
    MERGED: tl.constexpr,  # whether another kernel merges the parts
):
    """Attend with one query and head to one part of the keys: program (n * H + h, part)."""
    # There are no matrix products, as programs share no keys: each thread computes the softmax of
    # the keys that it loads, in float32, and these are merged at the end.
    query_row = (tl.program_id(0) // heads).to(tl.int64)
    sequence = query_row // GROUP
    head = (tl.program_id(0) % heads).to(tl.int64)
    key_head = head // SHARE
    part = tl.program_id(1)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_width = d < WIDTH
    length = tl.minimum(tl.load(lengths + sequence), columns * size)
    query = tl.load(q + query_row * q_row + head * q_head + d, mask=in_width, other=0.0)
    query = query.to(tl.float32) * scale_log2
    page_table += sequence * table_row
    k_pages += key_head * k_head
    v_pages += key_head * v_head

    # A new key, the last one, is not yet in a page.
    stored_length = length
    if new_k is not None:
        stored_length = tl.maximum(length - 1, 0)
    begin, end = locate_part(stored_length, splits, BLOCK_N)
    largest = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        page, key, exists = locate_keys(
            page_table, first, n, end, pages, size, table_column, BLOCK_N, WITHIN
        )
        real = first + n < end
        mask = (real & exists)[:, None] & in_width[None, :]
        k_place = point(k_pages, page, key, n, d, k_page, k_key, WITHIN)
        k_tile = tl.load(k_place, mask=mask, other=0.0)
        v_place = point(v_pages, page, key, n, d, v_page, v_key, WITHIN)
        v_tile = tl.load(v_place, mask=mask, other=0.0)
        scores = tl.sum(k_tile.to(tl.float32) * query[None, :], 1)
        scores = tl.where(real, tl.where(exists, scores, float("nan")), float("-inf"))
        larger = tl.maximum(largest, scores)
        pivot = tl.where(larger == float("-inf"), 0.0, larger)
        shrink = tl.exp2(largest - pivot)
        weights = tl.exp2(scores - pivot)
        total = total * shrink + weights
        acc = acc * shrink[:, None] + weights[:, None] * v_tile.to(tl.float32)
        largest = larger

    # Merge the softmaxes of the threads.
    top = tl.max(largest, 0)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.exp2(largest - pivot)
    # A maximum may lose a NaN; the sums keep it.
    mass = tl.sum(total * shrink, 0)
    sums = tl.sum(acc * shrink[:, None], 0)
    if new_k is not None:  # noqa: SIM102 (one is known when compiled, the other is not)
        if (part == 0) & (length > 0):
            page, key, exists = locate_keys(
                page_table, length - 1, 0, length, pages, size, table_column, 1, True
            )
            # One of the programs that share a head of keys writes it; none reads it from the page.
            is_written = exists & (head % SHARE == 0)
            new_k += query_row * new_k_row + key_head * new_k_head
            new_v += query_row * new_v_row + key_head * new_v_head
            k_new = move_row(new_k, k_pages, page, key, d, k_page, k_key, in_width, is_written)
            v_new = move_row(new_v, v_pages, page, key, d, v_page, v_key, in_width, is_written)
            score = tl.sum(k_new.to(tl.float32) * query, 0)
            score = tl.where(exists, score, float("nan"))
            larger = tl.maximum(top, score)
            pivot = tl.where(larger == float("-inf"), 0.0, larger)
            shrunk, weight = tl.exp2(top - pivot), tl.exp2(score - pivot)
            mass = mass * shrunk + weight
            sums = sums * shrunk + weight * v_new.to(tl.float32)
            top = larger

    row = query_row * heads + head
    if MERGED:
        row += part.to(tl.int64) * rows * heads
        tl.store(partial + row * WIDTH + d, sums, mask=in_width)
        tl.store(statistics + row, top)
        tl.store(statistics + splits.to(tl.int64) * rows * heads + row, mass)
    else:
        sums = sums / tl.where(mass == 0, 1.0, mass)
        tl.store(out + row * WIDTH + d, sums.to(out.dtype.element_ty), mask=in_width)


@triton.jit(
    do_not_specialize=["splits", "pages", "size", "columns", "table_row", "table_column", "rows"]
)
def attend_several(
    q,  # (N, H, D)
    k_pages,  # (P, B, Hk, D), written to where there is `new_k`
    v_pages,  # likewise
    page_table,  # int32 (S, M)
    lengths,  # int32 (S,)
    new_k,
    new_v,
    out,  # (N, H, D)
    partial,  # float32 (splits, N, H, D)
    statistics,  # float32 (2, splits, N, H)
    splits,  # parts of the keys
    pages,  # P
    size,  # B
    columns,  # M
    table_row,
    table_column,
    rows,
    heads,  # H
    q_row,
    q_head,
    k_page,
    k_key,
    k_head,
    v_page,
    v_key,
    v_head,
    new_k_row,
    new_k_head,
    new_v_row,
    new_v_head,
    scale_log2,
    GROUP: tl.constexpr,  # N / S * H / Hk, rows of a sequence and head of keys
    SHARE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    WIDTH: tl.constexpr,  # D
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WITHIN: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Attend with queries of a sequence to one part of the keys: program (s * Hk + h, part, i)."""
    # The rows of a sequence and head of keys are its N / S queries in H / Hk heads each. The
    # program processes ``BLOCK_G`` rows from number ``i * BLOCK_G`` on. It loads a tile of keys
    # once for all of them, and computes matrix products.
    sequence = (tl.program_id(0) // (heads // SHARE)).to(tl.int64)
    key_head = (tl.program_id(0) % (heads // SHARE)).to(tl.int64)
    g = tl.program_id(2) * BLOCK_G + tl.arange(0, BLOCK_G)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_width = d < WIDTH
    in_group = (g < GROUP)[:, None] & in_width[None, :]
    length = tl.minimum(tl.load(lengths + sequence), columns * size)
    row = sequence * (GROUP // SHARE) + g // SHARE
    head = key_head * SHARE + g % SHARE
    q_tile = tl.load(
        q + (row * q_row + head * q_head)[:, None] + d[None, :], mask=in_group, other=0.0
    )
    page_table += sequence * table_row
    k_pages += key_head * k_head
    v_pages += key_head * v_head

    # A new key, the last one, is not yet in a page.
    stored_length = length
    if new_k is not None:
        stored_length = tl.maximum(length - 1, 0)
    begin, end = locate_part(stored_length, splits, BLOCK_N)
    largest = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for first in range(begin, end, BLOCK_N):
        page, key, exists = locate_keys(
            page_table, first, n, end, pages, size, table_column, BLOCK_N, WITHIN
        )
        real = first + n < end
        mask = (real & exists)[:, None] & in_width[None, :]
        k_place = point(k_pages, page, key, n, d, k_page, k_key, WITHIN)
        k_tile = tl.load(k_place, mask=mask, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
        scores = tl.where((real & exists)[None, :], scores, float("nan"))
        scores = tl.where(real[None, :], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        pivot = tl.where(larger == float("-inf"), 0.0, larger)
        shrink = tl.exp2(largest - pivot)
        weights = tl.exp2(scores - pivot[:, None])
        total = total * shrink + tl.sum(weights, 1)
        v_place = point(v_pages, page, key, n, d, v_page, v_key, WITHIN)
        v_tile = tl.load(v_place, mask=mask, other=0.0)
        acc = acc * shrink[:, None]
        acc += tl.dot(weights.to(v_tile.dtype), v_tile, input_precision="ieee")
        largest = larger

    if new_k is not None:  # noqa: SIM102 (one is known when compiled, the other is not)
        if (tl.program_id(1) == 0) & (length > 0):
            page, key, exists = locate_keys(
                page_table, length - 1, 0, length, pages, size, table_column, 1, True
            )
            is_written = exists & (tl.program_id(2) == 0)
            new_k += sequence * new_k_row + key_head * new_k_head
            new_v += sequence * new_v_row + key_head * new_v_head
            k_new = move_row(new_k, k_pages, page, key, d, k_page, k_key, in_width, is_written)
            v_new = move_row(new_v, v_pages, page, key, d, v_page, v_key, in_width, is_written)
            score = tl.sum(q_tile.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale_log2
            score = tl.where(exists, score, float("nan"))
            larger = tl.maximum(largest, score)
            pivot = tl.where(larger == float("-inf"), 0.0, larger)
            shrink, weight = tl.exp2(largest - pivot), tl.exp2(score - pivot)
            total = total * shrink + weight
            acc = acc * shrink[:, None] + weight[:, None] * v_new.to(tl.float32)[None, :]
            largest = larger

    index = row * heads + head
    if MERGED:
        index += tl.program_id(1).to(tl.int64) * rows * heads
        tl.store(partial + index[:, None] * WIDTH + d[None, :], acc, mask=in_group)
        tl.store(statistics + index, largest, mask=g < GROUP)
        statistics += splits.to(tl.int64) * rows * heads
        tl.store(statistics + index, total, mask=g < GROUP)
    else:
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        index = index[:, None] * WIDTH + d[None, :]
        tl.store(out + index, acc.to(out.dtype.element_ty), mask=in_group)


@triton.jit
def locate_part(length, splits, BLOCK_N: tl.constexpr):
    """The first key and one past the last of this program's part; parts are whole tiles."""
    tiles = tl.cdiv(tl.cdiv(length, BLOCK_N), splits)
    begin = tl.program_id(1) * tiles * BLOCK_N
    return begin, tl.minimum(begin + tiles * BLOCK_N, length)


@triton.jit
def locate_keys(
    table, first, n, end, pages, size, table_column, BLOCK_N: tl.constexpr, WITHIN: tl.constexpr
):
    """The page and the row in it, int64, of the keys ``first + n``, and whether the page exists."""
    if WITHIN:
        page = tl.load(table + first // size * table_column)
        key = first % size
    else:
        page = tl.load(table + (first + n) // size * table_column, mask=first + n < end, other=0)
        key = (first + n) % size
    exists = (page >= 0) & (page < pages)
    return tl.where(exists, page, 0).to(tl.int64), key.to(tl.int64), exists


@triton.jit
def point(x, page, key, n, d, x_page, x_key, WITHIN: tl.constexpr):
    """Pointers to the tile of keys at `locate_keys`, (BLOCK_N, BLOCK_D)."""
    if WITHIN:
        index = x + (page * x_page + key * x_key) + n[:, None] * x_key
    else:
        index = x + (page * x_page + key * x_key)[:, None]
    return index + d[None, :]


@triton.jit
def move_row(new, x, page, key, d, x_page, x_key, in_width, is_written):
    """Return a new row of keys or values, (BLOCK_D,), and write it to its page if asked."""
    row = tl.load(new + d, mask=in_width, other=0.0)
    tl.store(x + page * x_page + key * x_key + d, row, mask=in_width & is_written)
    return row


@triton.jit(do_not_specialize=["splits", "count"])
def merge_parts(
    partial,  # float32 (splits, N, H, D), contiguous
    statistics,  # float32 (2, splits, N, H), contiguous
    out,  # (N, H, D), contiguous, written; zeros without keys
    splits,  # number of parts
    count,  # n * H
    WIDTH: tl.constexpr,  # D
    BLOCK_D: tl.constexpr,  # the power of two that D is padded to
    BLOCK_S: tl.constexpr,
):
    """Merge the parts of a query and head: program (n * H + h)."""
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    in_width = d < WIDTH
    row = tl.program_id(0).to(tl.int64)
    masses = statistics + splits.to(tl.int64) * count
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, splits, BLOCK_S):
        real = first + s < splits
        index = (first + s).to(tl.int64) * count + row
        tops = tl.load(statistics + index, mask=real, other=float("-inf"))
        mass = tl.load(masses + index, mask=real, other=0.0)
        mask = real[:, None] & in_width[None, :]
        sums = tl.load(partial + index[:, None] * WIDTH + d[None, :], mask=mask, other=0.0)
        larger = tl.maximum(largest, tl.max(tops, 0))
        pivot = tl.where(larger == float("-inf"), 0.0, larger)
        shrink, shares = tl.exp2(largest - pivot), tl.exp2(tops - pivot)
        total = total * shrink + tl.sum(mass * shares, 0)
        acc = acc * shrink + tl.sum(sums * shares[:, None], 0)
        largest = larger
    acc = acc / tl.where(total == 0, 1.0, total)
    tl.store(out + row * WIDTH + d, acc.to(out.dtype.element_ty), mask=in_width)
