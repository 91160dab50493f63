"""The kernels of `effasr_kernels.attention.triton.relative.relative_backward`."""

import triton
import triton.language as tl

from effasr_kernels.attention.triton.context import diagonals_of_tile, groups_seen, keys_of_tile
from effasr_kernels.attention.triton.relative_scores import STEP, is_below, is_spare
from effasr_kernels.runtime.tiles import find_sequence, locate_tile
from effasr_kernels.shared.last_program import is_last_program


@triton.jit(do_not_specialize=["sequences", "rows", "reach", "eighths", "left", "right", "chunk"])
def grad_queries(
    grad_q,  # (T_q, H, D), a pointer, written, rows contiguous; zeros in the tail
    grad_biases,  # float32 (tiles, 2, H, D), a pointer, written: sums of both parts over the tile
    grad_scores,  # (T_q, H, 8 eighths), a pointer; zeros past the last key up to a multiple of 8
    k,  # (T_k, H, D), a pointer
    table,  # (2 reach - 1, H, D), a pointer
    cu_seqlens_q,  # int32 (N + 1,), a pointer
    cu_seqlens_k,  # int32 (N + 1,), a pointer
    tiles,  # int32 (1 + tiles, 4), of BLOCK_M * STEP queries; see `locate_tile`
    sequences,  # N
    rows,  # T_q
    reach,  # L
    eighths,  # an eighth of the width of `grad_scores`
    scale,  # factor of the scores
    heads,  # H
    k_row,
    k_head,
    stride_distance,
    stride_table_head,
    grad_row,
    left,  # of a context; see `effasr_kernels.attention.triton.context`. None without.
    right,  # of a context, or None
    chunk,  # of a context, or None
    WIDTH: tl.constexpr,  # D
    BLOCK_D: tl.constexpr,  # the power of two at or above D
    BLOCK_M: tl.constexpr,
    # Keys of a step. It differs from ``BLOCK_W``, as otherwise the compiler gives both kinds of
    # tiles the same layout.
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Compute the gradient of a tile of queries of one head, and the sums of its two parts."""
    # The content part is the gradient of the scores times the keys, the distance part times the
    # table. The latter iterates over the table like `relative_scores.scores`; here the shift is in
    # the addresses of the loads.
    tile, head = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, BLOCK_D)
    in_width = channel < WIDTH
    grad_biases += (tile.to(tl.int64) * (2 * heads) + head) * WIDTH + channel
    to_distance = heads * WIDTH
    nothing = tl.zeros((BLOCK_D,), dtype=tl.float32)
    if tiles is None:  # noqa: SIM102 -- a constant
        if is_spare(cu_seqlens_q, sequences, tile // STEP, BLOCK_M * STEP):
            tl.store(grad_biases, nothing, mask=in_width)
            tl.store(grad_biases + to_distance, nothing, mask=in_width)
            return
    sequence, begin, length, start = locate_tile(
        tiles, cu_seqlens_q, sequences, rows, tile // STEP, BLOCK_M * STEP
    )
    start += tile % STEP
    if start >= length:
        tl.store(grad_biases, nothing, mask=in_width)
        tl.store(grad_biases + to_distance, nothing, mask=in_width)
        return
    first_k, keys = find_sequence(cu_seqlens_k, sequences, sequence)

    row = tl.arange(0, BLOCK_M)
    # The last query of the tile within the sequence.
    last = tl.minimum((length - 1 - start) // STEP, BLOCK_M - 1)
    in_range = row <= last
    grad_scores += ((begin + start) * heads + head) * (eighths * 8)
    score_row = STEP * (heads * eighths * 8)

    n = tl.arange(0, BLOCK_N)
    # The mask is constant within vectors of 8, so that loads are vectorized.
    by_eight = n // 8 * 8
    offset = (row * score_row)[:, None] + n[None, :]
    k += first_k * k_row + head * k_head
    key_offset = n[:, None] * k_row + channel[None, :]
    by_content = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    low, high = 0, keys
    if chunk is not None:
        low, high = keys_of_tile(start, start + last * STEP, keys, left, right, chunk, BLOCK_N)
        first_group, end_group = groups_seen(start + row * STEP, left, right, chunk)
        k += low * k_row
    for step in range(0, high - low, BLOCK_N):
        first = low + step
        visible = (first + by_eight < keys)[None, :] & in_range[:, None]
        if chunk is not None:
            group = (first + by_eight)[None, :]
            visible = visible & (group >= first_group[:, None]) & (group < end_group[:, None])
        ds = tl.load(grad_scores + first + offset, mask=visible, other=0.0)
        key = tl.load(
            k + key_offset, mask=(first + n < keys)[:, None] & in_width[None, :], other=0.0
        )
        by_content = tl.dot(ds, key, by_content, input_precision="ieee")
        k += BLOCK_N * k_row

    diagonal = tl.arange(0, BLOCK_W)
    keys = tl.cdiv(keys, STEP) * STEP
    grad_scores -= last * STEP
    # Each row is shifted by one more key.
    offset = (row * (score_row + STEP))[:, None] + diagonal[None, :]
    first_key = diagonal[None, :] + ((row - last) * STEP)[:, None]
    largest = reach - 1 + start + last * STEP
    table += head * stride_table_head
    by_distance = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    # Without keys, as in the tail, there is no step.
    low, high = 0, tl.where(keys > 0, keys + last * STEP, 0)
    if chunk is not None:
        low, high = diagonals_of_tile(
            start + last * STEP, keys, last * STEP, left, right, chunk, 16
        )
        high = tl.where(keys > 0, high, 0)
    for step in range(0, high - low, BLOCK_W):
        first = low + step
        visible = is_below(first + first_key, keys) & in_range[:, None]
        if chunk is not None:
            key = first + first_key
            visible = visible & (key >= first_group[:, None]) & (key < end_group[:, None])
        ds = tl.load(grad_scores + first + offset, mask=visible, other=0.0)
        entry = largest - first - diagonal
        window = tl.load(
            table + entry.to(tl.int64)[:, None] * stride_distance + channel[None, :],
            mask=is_below(entry, 2 * reach - 1)[:, None] & in_width[None, :],
            other=0.0,
        )
        by_distance = tl.dot(ds, window, by_distance, input_precision="ieee")

    tl.store(grad_biases, tl.sum(by_content, axis=0) * scale, mask=in_width)
    grad_biases += to_distance
    tl.store(grad_biases, tl.sum(by_distance, axis=0) * scale, mask=in_width)
    grad_q += (begin + start) * grad_row + head * WIDTH
    tl.store(
        grad_q + (row * (STEP * grad_row))[:, None] + channel[None, :],
        ((by_content + by_distance) * scale).to(grad_q.dtype.element_ty),
        mask=in_range[:, None] & in_width[None, :],
    )


@triton.jit
def sequences_of(cu_seqlens, sequences, first_row, end_row):
    """The sequences with rows in a range: the first, and one past the last."""
    # The counts are scalars in the loop: with vectors that are summed after it, the compiler
    # (Triton 3.7) loses the alignment of pointers inside nested loops that begin at the counts.
    index = tl.arange(0, 512)
    first, end = 0, 0
    for several in range(0, sequences, 512):
        n = several + index
        begin = tl.load(cu_seqlens + n, mask=n < sequences, other=2**31 - 1)
        # Sequence 0 always begins at row 0 and is not counted, so that the result is an index.
        first += tl.sum(((begin <= first_row) & (n > 0)).to(tl.int32))
        end += tl.sum((begin < end_row).to(tl.int32))
    return first, end


@triton.jit
def _add_splits(
    grad,
    by_split,
    first,
    entries,
    splits,
    of_split,
    heads,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write the sums over splits of BLOCK_W entries of one head of the table, from ``first`` on."""
    PART: tl.constexpr = BLOCK_W // 2  # in parts: fewer registers than a loop over queries
    row = tl.arange(0, PART)
    channel = tl.arange(0, BLOCK_D)
    for start in range(first, first + BLOCK_W, PART):
        entry = start + row
        mask = is_below(entry, entries)[:, None] & (channel < WIDTH)[None, :]
        offset = entry.to(tl.int64)[:, None] * (heads * WIDTH) + channel[None, :]
        total = tl.zeros((PART, BLOCK_D), dtype=tl.float32)
        for split in range(splits):
            part = by_split + split * of_split + offset
            total += tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(grad + offset, total.to(grad.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["sequences", "rows", "reach", "eighths", "splits", "left", "right", "chunk"]
)
def grad_table(
    grad,  # (2 reach - 1, H, D), a pointer, written
    by_split,  # float32 (splits, 2 reach - 1, H, D), a pointer, written: the sums of each split
    counters,  # int32 (blocks * H,), a pointer; see `is_last_program`
    grad_scores,  # (T_q, H, 8 eighths), a pointer
    q,  # (T_q, H, D), a pointer
    position_bias,  # (H, D), a pointer
    cu_seqlens_q,  # int32 (N + 1,), a pointer
    cu_seqlens_k,  # int32 (N + 1,), a pointer
    sequences,  # N
    rows,  # T_q
    reach,  # L
    eighths,  # an eighth of the width of `grad_scores`
    splits,
    scale,  # factor of the scores
    heads,  # H
    stride_row,
    stride_head,
    left,  # of a context; see `effasr_kernels.attention.triton.context`. None without.
    right,  # of a context, or None
    chunk,  # of a context, or None
    WIDTH: tl.constexpr,  # D
    BLOCK_D: tl.constexpr,  # the power of two at or above D
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Sum the gradient of a block of distances of one head over a split of the queries."""
    # A split is a range of rows, and includes the tiles of sequences that begin in it. Blocks of
    # small distances have the most pairs and come first. The last program that has a part of a
    # block and head adds the parts of all splits, in their order.
    split, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    phase = split % STEP
    # Blocks 0, -1, 1, -2, 2, ...
    block = tl.program_id(1)
    nearest = tl.where(block % 2 == 0, block // 2, -(block + 1) // 2) * BLOCK_W
    total_rows = tl.load(cu_seqlens_q + sequences)
    share = tl.cdiv(total_rows, splits // STEP)
    first_row = split // STEP * share
    end_row = tl.minimum(first_row + share, total_rows)
    first_sequence, end_sequence = sequences_of(cu_seqlens_q, sequences, first_row, end_row)

    row = tl.arange(0, BLOCK_M)
    diagonal = tl.arange(0, BLOCK_W)
    # Distances descend, so that the keys of a query ascend; STEP divides the first key of a row.
    back = (STEP - phase) % STEP
    largest = nearest + BLOCK_W - back
    if chunk is not None:
        # No query sees a key at one of these distances.
        hidden = (nearest - back >= left + chunk) | (largest <= -(right + chunk))
        end_sequence = tl.where(hidden, first_sequence, end_sequence)
    # (W, M): with (M, W) the compiler would load it in the layout of the queries.
    offset = diagonal[:, None] + (row * (STEP * (heads * eighths * 8 + 1)))[None, :]
    first_key = diagonal[:, None] + (row * STEP)[None, :] - BLOCK_W
    channel = tl.arange(0, BLOCK_D)
    in_width = channel < WIDTH
    bias = tl.load(position_bias + head * WIDTH + channel, mask=in_width, other=0.0)
    bias = bias.to(tl.float32)[None, :]
    query_offset = (row * (STEP * stride_row))[:, None] + channel[None, :]
    total = tl.zeros((BLOCK_W, BLOCK_D), dtype=tl.float32)
    q += head * stride_head
    grad_scores += head * (eighths * 8) - BLOCK_W
    for sequence in range(first_sequence, end_sequence):
        begin = tl.load(cu_seqlens_q + sequence)
        length = tl.load(cu_seqlens_q + sequence + 1) - begin
        keys = tl.load(cu_seqlens_k + sequence + 1) - tl.load(cu_seqlens_k + sequence)
        keys = tl.cdiv(keys, STEP) * STEP
        # The tiles of queries that have a key at one of these distances.
        low = tl.maximum(nearest - back, 0) // (BLOCK_M * STEP)
        high = tl.cdiv(tl.minimum(length, tl.maximum(keys + largest, 0)), BLOCK_M * STEP)
        low = tl.maximum(low, tl.cdiv(first_row - begin, BLOCK_M * STEP))
        high = tl.minimum(high, tl.cdiv(end_row - begin, BLOCK_M * STEP))
        # A pipelined loop prefetches even if it has no iteration.
        if low < high:
            for tile in range(low, high):
                start = tile * (BLOCK_M * STEP)
                in_range = start + phase + row * STEP < length
                query_row = begin.to(tl.int64) + start + phase
                # The key that the first query has at the largest distance.
                skip = start - nearest + (phase + back) // STEP * STEP
                visible = is_below(skip + first_key, keys) & in_range[None, :]
                if chunk is not None:
                    first_group, end_group = groups_seen(
                        start + phase + row * STEP, left, right, chunk
                    )
                    key = skip + first_key
                    visible = visible & (key >= first_group[None, :]) & (key < end_group[None, :])
                ds = tl.load(
                    grad_scores + query_row * (heads * eighths * 8) + skip + offset,
                    mask=visible,
                    other=0.0,
                )
                query = tl.load(
                    q + query_row * stride_row + query_offset,
                    mask=in_range[:, None] & in_width[None, :],
                    other=0.0,
                )
                query = (query.to(tl.float32) + bias).to(query.dtype)
                total = tl.dot(ds, query, total, input_precision="ieee")
    entry = reach - 1 + largest - diagonal
    at = (entry.to(tl.int64) * heads + head)[:, None] * WIDTH + channel[None, :]
    mask = is_below(entry, 2 * reach - 1)[:, None] & in_width[None, :]
    of_split = (2 * reach - 1).to(tl.int64) * heads * WIDTH
    tl.store(by_split + split * of_split + at, total * scale, mask=mask)
    # A block of phase 0 begins one distance later than a block of phase 1, and ends in the next,
    # so that its programs take part in both. The sums are of blocks of phase 1. No block begins
    # where the last one ends: at distance L or more, which the table does not have.
    half = tl.num_programs(1) // 2
    number = nearest // BLOCK_W + half
    for several in range(number, tl.minimum(number + 2 - phase, 2 * half)):
        programs = tl.where(several == 0, splits, splits // STEP * (STEP + 1))
        if is_last_program(counters, several * heads + head, programs):
            _add_splits(
                grad + head * WIDTH,
                by_split + head * WIDTH,
                reach - 1 + (several - half) * BLOCK_W,
                2 * reach - 1,
                splits,
                of_split,
                heads,
                WIDTH,
                BLOCK_D,
                BLOCK_W,
            )
