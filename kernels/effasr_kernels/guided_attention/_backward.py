"""Gradients of guided attention: one kernel for queries, one for keys and values, no atomics.

With A the weights, g their distance from the diagonal, and dy and dp the gradients of output and
penalty,

    dA_ij = keep_ij / (1 - probability) (dy_i . v_j) + dp_i g_ij
    dS_ij = A_ij (dA_ij - delta_i),    delta_i = sum_j A_ij dA_ij = dy_i . y_i + dp_i p_i

so the penalty adds one term to each of the two formulas of FlashAttention-2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from effasr_kernels.guided_attention._diagonal import COUNTS, distance, in_tile
from effasr_kernels.runtime.tiles import find_sequence, find_tile
from effasr_kernels.shared.philox import keep_mask


@triton.jit
def scale_unless_alone(scale, keys):
    """The factor of the scores' gradients; 0 for a single key, whose weight is always 1.

    For a single key ``dA - delta`` is exactly 0, but computed with a rounding error.
    """
    return tl.where(keys == 1, 0.0, scale)


@triton.jit(do_not_specialize=COUNTS)
def guided_backward_q(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    seed,
    out,
    penalty,
    lse,
    grad_out,
    grad_penalty,
    per_query,
    grad_q,
    sequences,
    rows_q,
    heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    scale,
    scale_log2,
    narrowness,
    probability,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Compute the gradient of one tile of queries of one head: program (tile, head).

    The arguments are those of `guided_forward` and:

    - ``grad_out`` (U, H, D) and ``grad_penalty`` float32 (U, H), contiguous;
    - ``per_query``, float32 (2, H, U), contiguous, written for `guided_backward_kv`: delta, and the
      gradient of the penalty, heads first, so that queries lie side by side;
    - ``grad_q`` (U, H, D), contiguous, written; zeros for rows without keys;
    - ``scale``, the factor of the scores.
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
    # Contiguous tensors of a row for each query, and numbers for each query.
    wide = (first_row * heads + head) * WIDTH + m[:, None] * (heads * WIDTH) + d[None, :]
    narrow = first_row * heads + head + m * heads
    transposed = wide_head * rows_q + first_row + m
    heads_rows = heads.to(tl.int64) * rows_q
    dy = tl.load(grad_out + wide, mask=q_mask, other=0.0)
    dp = tl.load(grad_penalty + narrow, mask=in_rows, other=0.0)
    y = tl.load(out + wide, mask=q_mask, other=0.0)
    p = tl.load(penalty + narrow, mask=in_rows, other=0.0)
    mean = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1) + dp * p
    tl.store(per_query + transposed, mean, mask=in_rows)
    tl.store(per_query + heads_rows + transposed, dp, mask=in_rows)
    row_lse = tl.load(lse + transposed, mask=in_rows, other=0.0)
    token = (start + m) * (1.0 / length_q)
    frame_step = 1.0 / tl.maximum(length_k, 1)
    if DROPOUT:
        seed_value = tl.load(seed)
        keep_scale = 1 / (1 - probability)

    k += first_k * (k_row * 8) + wide_head * (k_head * 8)
    v += first_k * (v_row * 8) + wide_head * (v_head * 8)
    k_offset = n[:, None] * (k_row * 8) + d[None, :]
    v_offset = n[:, None] * (v_row * 8) + d[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for column in range(0, length_k, BLOCK_N):
        in_columns = column + n < length_k
        k_mask = in_tile(in_columns, WIDTH, BLOCK_D)
        k_tile = tl.load(k + k_offset, mask=k_mask, other=0.0)
        v_tile = tl.load(v + v_offset, mask=k_mask, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
        weights = tl.exp2(scores - row_lse[:, None])
        weights = tl.where(in_columns[None, :], weights, 0.0)
        grad_weights = tl.dot(dy, tl.trans(v_tile), input_precision="ieee")
        if DROPOUT:
            keep = keep_mask(
                seed_value, sequence, head, start, column, probability, BLOCK_M, BLOCK_N
            )
            grad_weights = tl.where(keep, grad_weights * keep_scale, 0.0)
        frame = (column + n) * frame_step
        grad_weights += dp[:, None] * distance(token[:, None], frame[None, :], narrowness)
        grad_scores = weights * (grad_weights - mean[:, None])
        acc += tl.dot(grad_scores.to(k_tile.dtype), k_tile, input_precision="ieee")
        k += BLOCK_N * (k_row * 8)
        v += BLOCK_N * (v_row * 8)
    acc *= scale_unless_alone(scale, length_k)
    tl.store(grad_q + wide, acc.to(grad_q.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=COUNTS)
def guided_backward_kv(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    seed,
    lse,
    grad_out,
    per_query,
    grad_k,
    grad_v,
    sequences,
    rows_q,
    rows_k,
    heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    scale,
    scale_log2,
    narrowness,
    probability,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Compute the gradients of one tile of keys and values of one head: program (tile, head).

    Tiles of weights are transposed, keys by queries, as their products need them. The arguments are
    those of `guided_backward_q`, which must have run before, and:

    - ``grad_k`` and ``grad_v`` (T, H, D), contiguous, written; zeros for keys without queries;
    - ``rows_k``, which is T.
    """
    sequence, first_k, length_k, start = find_tile(  # pyright: ignore[reportGeneralTypeIssues]
        cu_seqlens_k, sequences, rows_k, tl.program_id(0), BLOCK_N
    )
    if start >= length_k:
        return
    head = tl.program_id(1)
    wide_head = head.to(tl.int64)
    first_q, length_q = find_sequence(cu_seqlens_q, sequences, sequence)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_columns = start + n < length_k
    first_column = first_k + start

    k_mask = in_tile(in_columns, WIDTH, BLOCK_D)
    k_offset = n[:, None] * (k_row * 8) + d[None, :]
    v_offset = n[:, None] * (v_row * 8) + d[None, :]
    k_tile = tl.load(
        k + first_column * (k_row * 8) + wide_head * (k_head * 8) + k_offset, mask=k_mask, other=0.0
    )
    v_tile = tl.load(
        v + first_column * (v_row * 8) + wide_head * (v_head * 8) + v_offset, mask=k_mask, other=0.0
    )
    frame = (start + n) * (1.0 / length_k)
    token_step = 1.0 / tl.maximum(length_q, 1)
    if DROPOUT:
        seed_value = tl.load(seed)
        keep_scale = 1 / (1 - probability)

    q += first_q * (q_row * 8) + wide_head * (q_head * 8)
    grad_out += (first_q * heads + head) * WIDTH
    lse += wide_head * rows_q + first_q
    delta = per_query + wide_head * rows_q + first_q
    grad_penalty = delta + heads.to(tl.int64) * rows_q
    q_offset = m[:, None] * (q_row * 8) + d[None, :]
    dy_offset = m[:, None] * (heads * WIDTH) + d[None, :]
    k_acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    v_acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for row in range(0, length_q, BLOCK_M):
        in_rows = row + m < length_q
        q_mask = in_tile(in_rows, WIDTH, BLOCK_D)
        q_tile = tl.load(q + q_offset, mask=q_mask, other=0.0)
        dy = tl.load(grad_out + dy_offset, mask=q_mask, other=0.0)
        # lse = inf makes the weights past the last query zero.
        row_lse = tl.load(lse + m, mask=in_rows, other=float("inf"))
        mean = tl.load(delta + m, mask=in_rows, other=0.0)
        dp = tl.load(grad_penalty + m, mask=in_rows, other=0.0)
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee") * scale_log2
        weights = tl.exp2(scores - row_lse[None, :])
        grad_weights = tl.dot(v_tile, tl.trans(dy), input_precision="ieee")
        dropped = weights
        if DROPOUT:
            keep = tl.trans(
                keep_mask(seed_value, sequence, head, row, start, probability, BLOCK_M, BLOCK_N)
            )
            dropped = tl.where(keep, weights, 0.0)
            grad_weights = tl.where(keep, grad_weights * keep_scale, 0.0)
        v_acc += tl.dot(dropped.to(dy.dtype), dy, input_precision="ieee")
        token = (row + m) * token_step
        grad_weights += dp[None, :] * distance(token[None, :], frame[:, None], narrowness)
        grad_scores = weights * (grad_weights - mean[None, :])
        k_acc += tl.dot(grad_scores.to(q_tile.dtype), q_tile, input_precision="ieee")
        q += BLOCK_M * (q_row * 8)
        grad_out += BLOCK_M * (heads * WIDTH)
        lse += BLOCK_M
        delta += BLOCK_M
        grad_penalty += BLOCK_M
    if DROPOUT:
        v_acc *= keep_scale
    wide = (first_column * heads + head) * WIDTH + n[:, None] * (heads * WIDTH) + d[None, :]
    k_acc *= scale_unless_alone(scale, length_k)
    tl.store(grad_k + wide, k_acc.to(grad_k.dtype.element_ty), mask=k_mask)
    tl.store(grad_v + wide, v_acc.to(grad_v.dtype.element_ty), mask=k_mask)
