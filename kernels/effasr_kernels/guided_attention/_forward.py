"""The forward kernel of guided attention."""

from __future__ import annotations

import triton
import triton.language as tl

from effasr_kernels.guided_attention._diagonal import COUNTS, distance, in_tile
from effasr_kernels.runtime.tiles import find_sequence, find_tile
from effasr_kernels.shared.philox import keep_mask


@triton.jit(do_not_specialize=COUNTS)
def guided_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    seed,
    out,
    penalty,
    lse,
    sequences,
    rows_q,
    heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    scale_log2,
    narrowness,
    probability,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Compute output and penalty of one tile of queries of one head: program (tile, head).

    The softmax is computed online, as in FlashAttention-2 (https://arxiv.org/abs/2307.08691), with
    one more sum: the weights times their distance from the diagonal.

    Args:
        q: (U, H, D), a pointer, like all up to ``lse``.
        k: (T, H, D).
        v: (T, H, D).
        cu_seqlens_q: int32 (N + 1,).
        cu_seqlens_k: int32 (N + 1,).
        seed: int64 (1,); None without dropout.
        out: (U, H, D), contiguous, written; zeros for rows without keys.
        penalty: float32 (U, H), contiguous, written; zeros for rows without keys.
        lse: float32 (H, U), contiguous, written: the logarithm to base 2 of each row's sum.
        sequences: N.
        rows_q: U.
        heads: H.
        q_row: Elements from one row of ``q`` to the next, divided by 8.
        q_head: Elements from one head to the next, divided by 8.
        k_row: Row stride of ``k``.
        k_head: Head stride of ``k``.
        v_row: Row stride of ``v``.
        v_head: Head stride of ``v``.
        scale_log2: Factor of the scores, for powers of two.
        narrowness: ``1 / (2 sigma^2)``.
        probability: Probability to drop a weight.
        WIDTH: D, a multiple of 8.
        BLOCK_D: The power of two, at least 16, that D is padded to.
        BLOCK_M: Queries of a tile.
        BLOCK_N: Keys of a tile.
        DROPOUT: Whether weights are dropped.
    """
    sequence, first_q, length_q, start = find_tile(  # pyright: ignore[reportGeneralTypeIssues]
        cu_seqlens_q, sequences, rows_q, tl.program_id(0), BLOCK_M
    )
    if start >= length_q:
        return
    head = tl.program_id(1)
    wide_head = head.to(tl.int64)
    first_k, length_k = find_sequence(cu_seqlens_k, sequences, sequence)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_rows = start + m < length_q
    first_row = first_q + start

    q_mask = in_tile(in_rows, WIDTH, BLOCK_D)
    q_offset = m[:, None] * (q_row * 8) + d[None, :]
    q_tile = tl.load(
        q + first_row * (q_row * 8) + wide_head * (q_head * 8) + q_offset, mask=q_mask, other=0.0
    )
    token = (start + m) * (1.0 / length_q)
    frame_step = 1.0 / tl.maximum(length_k, 1)
    if DROPOUT:
        seed_value = tl.load(seed)

    k += first_k * (k_row * 8) + wide_head * (k_head * 8)
    v += first_k * (v_row * 8) + wide_head * (v_head * 8)
    k_offset = n[:, None] * (k_row * 8) + d[None, :]
    v_offset = n[:, None] * (v_row * 8) + d[None, :]
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    astray = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for column in range(0, length_k, BLOCK_N):
        in_columns = column + n < length_k
        k_mask = in_tile(in_columns, WIDTH, BLOCK_D)
        k_tile = tl.load(k + k_offset, mask=k_mask, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
        scores = tl.where(in_columns[None, :], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - larger)
        weights = tl.exp2(scores - larger[:, None])
        total = total * shrink + tl.sum(weights, 1)
        frame = (column + n) * frame_step
        away = distance(token[:, None], frame[None, :], narrowness)
        astray = astray * shrink + tl.sum(weights * away, 1)
        if DROPOUT:
            keep = keep_mask(
                seed_value, sequence, head, start, column, probability, BLOCK_M, BLOCK_N
            )
            weights = tl.where(keep, weights, 0.0)
        v_tile = tl.load(v + v_offset, mask=k_mask, other=0.0)
        acc = acc * shrink[:, None]
        acc += tl.dot(weights.to(v_tile.dtype), v_tile, input_precision="ieee")
        largest = larger
        k += BLOCK_N * (k_row * 8)
        v += BLOCK_N * (v_row * 8)

    # For a row without keys the sum is 0 and the output stays zero.
    total = tl.where(total == 0, 1.0, total)
    inverse = 1 / total
    astray *= inverse
    if DROPOUT:
        inverse *= 1 / (1 - probability)
    acc *= inverse[:, None]
    out += (first_row * heads + head) * WIDTH
    out_offset = m[:, None] * (heads * WIDTH) + d[None, :]
    tl.store(out + out_offset, acc.to(out.dtype.element_ty), mask=q_mask)
    tl.store(penalty + first_row * heads + head + m * heads, astray, mask=in_rows)
    tl.store(lse + wide_head * rows_q + first_row + m, largest + tl.log2(total), mask=in_rows)
