"""The kernel of `effasr_kernels.attention.triton.relative.relative_scores`."""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from effasr_kernels.attention.triton.context import diagonals_of_tile, groups_seen
from effasr_kernels.attention.triton.delta import sum_of_products
from effasr_kernels.runtime.tiles import locate_tile

STEP = tl.constexpr(2)
"""A tile has every second query, so that the relative shift moves rows by whole pairs of keys.
Pairs of 16-bit numbers are then aligned, and one instruction stores a pair."""


@triton.jit
def is_below(x, bound):
    """Whether 0 <= x < bound, with one unsigned comparison."""
    return x.to(tl.uint32, bitcast=True) < bound.to(tl.uint32, bitcast=True)


@triton.jit
def is_spare(cu_seqlens, sequences, tile, BLOCK: tl.constexpr):
    """Whether a tile's number belongs to an empty sequence after the last row."""
    # Static shapes have many of these; the check avoids the search of `find_tile`.
    total = tl.load(cu_seqlens + sequences)
    n = tile - total // BLOCK
    return tl.load(cu_seqlens + n, mask=(n >= 0) & (n < sequences), other=-1) == total


@triton.jit(do_not_specialize=["sequences", "rows", "reach", "eighths", "left", "right", "chunk"])
def scores(
    out,  # (T_q, H, 8 eighths), a pointer
    q,  # (T_q, H, D), a pointer
    position_bias,  # (H, D), a pointer
    table,  # (2 reach - 1, H, D), a pointer
    content_bias,  # (H, D), a pointer, or None
    biased,  # (T_q, H, D), a pointer, written: `q` plus `content_bias`; None without
    result,  # the result of attention, (T_q, H, D), contiguous, a pointer, or None
    grad_result,  # its gradient, (T_q, H, D), contiguous, a pointer; None without `result`
    delta,  # float32 (H, T_q), a pointer, written: sums of ``result * grad_result``; or None
    cu_seqlens_q,  # int32 (N + 1,), a pointer
    cu_seqlens_k,  # int32 (N + 1,), a pointer
    tiles,  # int32 (1 + tiles, 4), of BLOCK_M * STEP queries; see `locate_tile`
    sequences,  # N
    rows,  # T_q
    reach,  # L
    eighths,  # W / 8, so that the compiler knows that 8 divides the width W of `out`
    heads,  # H
    stride_row,
    stride_head,
    stride_distance,
    stride_table_head,
    left,  # of a context; see `effasr_kernels.attention.triton.context`. None without.
    right,  # of a context, or None
    chunk,  # of a context, or None
    WIDTH: tl.constexpr,  # D
    BLOCK_D: tl.constexpr,  # the power of two at or above D
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PART: tl.constexpr,  # rows of `result` that are read together
):
    """Compute the scores of a tile of queries of one head for all keys of their sequence."""
    # The tile's distances form a range of the table. The loop runs from the largest distance to the
    # smallest, so that the scores of a query come in the order of its keys: diagonal g of the loop
    # holds key ``g - shift`` of a query that is ``shift`` rows above the tile's last one. Every row
    # of the table is multiplied once per tile, and the shift is only in the addresses of the
    # stores.
    if tiles is None:  # noqa: SIM102 -- a constant
        if is_spare(cu_seqlens_q, sequences, tl.program_id(0) // STEP, BLOCK_M * STEP):
            return
    phase, head = tl.program_id(0) % STEP, tl.program_id(1)
    sequence, begin, length, start = locate_tile(
        tiles, cu_seqlens_q, sequences, rows, tl.program_id(0) // STEP, BLOCK_M * STEP
    )
    start += phase
    if (sequence >= sequences) | (start >= length):
        return
    keys = tl.load(cu_seqlens_k + sequence + 1) - tl.load(cu_seqlens_k + sequence)
    # Rounded up to vectors of 8, which the attention kernels read; W is a multiple of 8.
    keys = tl.cdiv(keys, 8) * 8

    row = tl.arange(0, BLOCK_M)
    # The last query of the tile within the sequence.
    last = tl.minimum((length - 1 - start) // STEP, BLOCK_M - 1)
    in_range = row <= last
    channel = tl.arange(0, BLOCK_D)
    in_width = channel < WIDTH
    bias = tl.load(position_bias + head * WIDTH + channel, mask=in_width, other=0.0)
    result_row = STEP * heads * WIDTH
    result_begin = ((begin + start) * heads + head) * WIDTH
    if delta is not None:
        # In parts, which take fewer registers than the loop over distances.
        part = tl.arange(0, PART)
        delta += head.to(tl.int64) * rows + begin + start
        for first in range(0, last + 1, PART):
            m = first + part
            sums = sum_of_products(
                result + result_begin,
                grad_result + result_begin,
                (m * result_row)[:, None] + channel[None, :],
                (m <= last)[:, None] & in_width[None, :],
            )
            tl.store(delta + m * STEP, sums, mask=m <= last)
    q += (begin + start) * stride_row + head * stride_head
    query = tl.load(
        q + (row * (STEP * stride_row))[:, None] + channel[None, :],
        mask=in_range[:, None] & in_width[None, :],
        other=0.0,
    )
    if content_bias is not None:
        other = tl.load(content_bias + head * WIDTH + channel, mask=in_width, other=0.0)
        both = query.to(tl.float32) + other.to(tl.float32)[None, :]
        tl.store(
            biased + result_begin + (row * result_row)[:, None] + channel[None, :],
            both.to(query.dtype),
            mask=in_range[:, None] & in_width[None, :],
        )
    query = (query.to(tl.float32) + bias.to(tl.float32)[None, :]).to(query.dtype)

    diagonal = tl.arange(0, BLOCK_W)
    out += ((begin + start) * heads + head) * (eighths * 8) - last * STEP
    # Each row is shifted by one more key.
    offset = (row * (STEP * (heads * eighths * 8 + 1)))[:, None] + diagonal[None, :]
    # The keys of rows past the last query are out of range.
    first_key = diagonal[None, :] + tl.where(in_range, (row - last) * STEP, 2**30)[:, None]
    largest = reach - 1 + start + last * STEP
    table += head * stride_table_head
    low, high = 0, keys + last * STEP
    if chunk is not None:
        # A multiple of 16, for aligned stores.
        low, high = diagonals_of_tile(
            start + last * STEP, keys, last * STEP, left, right, chunk, 16
        )
        first_group, end_group = groups_seen(start + row * STEP, left, right, chunk)
    for step in range(0, high - low, BLOCK_W):
        first = low + step
        entry = largest - first - diagonal
        # (D, BLOCK_W), a column for each distance.
        window = tl.load(
            table + entry.to(tl.int64)[None, :] * stride_distance + channel[:, None],
            mask=is_below(entry, 2 * reach - 1)[None, :] & in_width[:, None],
            other=0.0,
        )
        product = tl.dot(query, window, input_precision="ieee")
        visible = is_below(first + first_key, keys)
        if chunk is not None:
            key = first + first_key
            visible = visible & (key >= first_group[:, None]) & (key < end_group[:, None])
        tl.store(out + first + offset, product.to(query.dtype), mask=visible)
