"""Gradients of attention: one kernel for keys and values, one for queries, no float atomics.

With A the weights, and dy and dp the gradients of the output and of the penalty of
`guided_attention`, which is the sum over keys of A_ij g_ij,

    dA_ij = keep_ij / (1 - probability) (dy_i . v_j) + dp_i g_ij
    dS_ij = A_ij (dA_ij - delta_i),    delta_i = sum_j A_ij dA_ij = dy_i . y_i + dp_i p_i

so the penalty adds one term to each of the two formulas of FlashAttention-2.
"""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from effasr_kernels.attention.triton.context import (
    groups_seen,
    keys_of_tile,
    keys_seen,
    queries_of_tile,
)
from effasr_kernels.attention.triton.forward import as_scores, distance
from effasr_kernels.attention.triton.rotary import store_rotated_back
from effasr_kernels.runtime.tiles import find_sequence, locate_tile
from effasr_kernels.shared.philox import keep_mask

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(
    do_not_specialize=["sequences", "rows_q", "rows_k", "bias_eighths", "left", "right", "chunk"]
)
def attention_backward_kv(
    q,  # (T_q, H, D), a pointer, like all up to `grad_v`; rotated for rotary positions
    k,  # (T_k, H_k, D); rotated for rotary positions
    v,  # (T_k, H_k, D)
    bias,
    cos,
    sin,  # same shape as `cos`
    cu_seqlens_q,  # int32 (N + 1,)
    cu_seqlens_k,  # int32 (N + 1,)
    seed,  # int64 (1,); None without `DROPOUT`
    tiles,  # int32 (1 + tiles, 4), of keys; see `effasr_kernels.runtime.tiles.locate_tile`
    lse,  # float32 (H, T_q), contiguous, from the forward
    delta,  # float32 (H, T_q), or (2, H, T_q) with ``GUIDED``, from `row_delta`
    grad_out,  # (T_q, H, D), contiguous
    grad_k,  # (T_k, H_k, D), written, rows contiguous; zeros for keys without queries
    grad_v,  # (T_k, H_k, D), written, with the strides of `grad_k`
    sequences,  # N
    rows_q,  # T_q
    rows_k,  # T_k
    bias_eighths,  # W / 8
    heads,  # H
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    grad_row,
    left,
    right,  # of a context, or None
    chunk,  # of a context, or None
    scale,  # factor of the scores
    probability,  # probability to drop a weight
    narrowness,  # ``1 / (2 sigma^2)`` of `guided_attention`
    WIDTH: tl.constexpr,  # D
    BLOCK_D: tl.constexpr,  # the power of two, at least 16, that D is padded to
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,  # H / H_k, the heads of queries that share a head of keys and values
    CAUSAL: tl.constexpr,  # whether query i attends only to keys 0 to i
    BIAS: tl.constexpr,  # whether scores have a bias; the content bias is already added to `q`
    ROTARY: tl.constexpr,  # whether to rotate the gradient of keys back, all D = BLOCK_D channels
    DROPOUT: tl.constexpr,  # whether weights are dropped
    GUIDED: tl.constexpr,  # whether there is a gradient of the penalty of `guided_attention`
):
    """Gradients of one tile of keys and values of one of their heads: program (tile, head)."""
    # All tiles are transposed, keys by queries, so that the weights, which are in registers, are
    # the left factor of the products that sum over queries. The sum goes on over all heads of
    # queries that share the keys. Keys past the end of a sequence need no mask: their results stay
    # in their own rows, which are not stored.
    # With ``BIAS`` the kernel also overwrites the bias with the gradient of the scores: this
    # program alone reads each tile, before it writes it. The gradient of queries is a product with
    # it.
    sequence, first_k, length_k, start = locate_tile(
        tiles, cu_seqlens_k, sequences, rows_k, tl.program_id(0), BLOCK_N
    )
    if start >= length_k:
        return
    key_head = tl.program_id(1).to(tl.int64)
    first_q, length_q = find_sequence(cu_seqlens_q, sequences, sequence)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_width = d < WIDTH
    in_columns = start + n < length_k
    k_mask = in_columns[:, None] & in_width[None, :]
    first_key = first_k + start

    k += first_key * k_row + key_head * k_head
    v += first_key * v_row + key_head * v_head
    k_tile = tl.load(k + n[:, None] * k_row + d[None, :], mask=k_mask, other=0.0)
    v_tile = tl.load(v + n[:, None] * v_row + d[None, :], mask=k_mask, other=0.0)
    if DROPOUT:
        seed_value = tl.load(seed)
        scale_kept = 1 / (1 - probability)

    # With a causal mask, the first query that attends to this tile has the tile's position. The
    # loop still starts at zero, with moved pointers: otherwise the compiler does not prefetch. A
    # bias needs its gradient written at every key, including zeros, but for those that a context
    # hides.
    begin = start if CAUSAL and not BIAS else 0
    if chunk is not None:
        begin, length_q = queries_of_tile(
            start, tl.minimum(start + BLOCK_N, length_k) - 1, length_q, left, right, chunk, BLOCK_M
        )
    first_row = first_q + begin
    q += first_row * q_row
    grad_out += first_row * heads * WIDTH
    lse += first_row
    delta += first_row
    q_offset = m[:, None] * q_row + d[None, :]
    out_row = heads * WIDTH
    out_offset = m[:, None] * out_row + d[None, :]
    if BIAS:
        bias_row = heads * bias_eighths * 8
        bias += first_row * bias_row + key_head * (bias_eighths * 8) + start
        bias_offset = m[None, :] * bias_row + n[:, None]
        # The mask is constant within vectors of 8, so that loads are vectorized; W is a multiple.
        b_columns = (start + n // 8 * 8 < length_k)[:, None]
    if GUIDED:
        frame = (start + n) * (1.0 / length_k)
        token_step = 1.0 / tl.maximum(length_q, 1)
    acc_k = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    acc_v = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    length_q -= begin
    for member in range(GROUP):
        head = tl.program_id(1) * GROUP + member
        wide_head = head.to(tl.int64)
        q_rows = q + wide_head * q_head
        grad_rows = grad_out + wide_head * WIDTH
        lse_rows = lse + wide_head * rows_q
        delta_rows = delta + wide_head * rows_q
        if GUIDED:
            grad_penalty = delta_rows + rows_q.to(tl.int64) * heads
        for step in range(0, length_q, BLOCK_M):
            in_rows = step + m < length_q
            q_mask = in_rows[:, None] & in_width[None, :]
            q_tile = tl.load(q_rows + q_offset, mask=q_mask, other=0.0)
            grad_tile = tl.load(grad_rows + out_offset, mask=q_mask, other=0.0)
            # lse = inf makes all weights past the end zero, whatever the bias there is.
            row_lse = tl.load(lse_rows + m, mask=in_rows, other=float("inf"))
            row_delta = tl.load(delta_rows + m, mask=in_rows, other=0.0)
            if BIAS:
                b_mask = in_rows[None, :] & b_columns
                if chunk is not None:
                    first_group, end_group = groups_seen(begin + step + m, left, right, chunk)
                    group = (start + n // 8 * 8)[:, None]
                    b_mask = b_mask & (group >= first_group[None, :]) & (group < end_group[None, :])
                b_tile = tl.load(bias + bias_offset, mask=b_mask, other=0.0)
                scores = tl.dot(k_tile, tl.trans(q_tile), as_scores(b_tile), input_precision="ieee")
            else:
                scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
            scores *= scale * _LOG2_E
            if BIAS:
                visible = in_columns[:, None]
                if CAUSAL:
                    visible = visible & (step + m[None, :] >= start + n[:, None])
                if chunk is not None:
                    first_visible, end_visible = keys_seen(begin + step + m, left, right, chunk)
                    key = start + n[:, None]
                    visible = (
                        visible & (key >= first_visible[None, :]) & (key < end_visible[None, :])
                    )
                scores = tl.where(visible, scores, float("-inf"))
            elif CAUSAL:
                scores = tl.where(step + m[None, :] >= n[:, None], scores, float("-inf"))
            elif chunk is not None:
                first_visible, end_visible = keys_seen(begin + step + m, left, right, chunk)
                key = start + n[:, None]
                visible = (key >= first_visible[None, :]) & (key < end_visible[None, :])
                scores = tl.where(visible, scores, float("-inf"))
            weights = tl.exp2(scores - row_lse[None, :])
            grad_weights = tl.dot(v_tile, tl.trans(grad_tile), input_precision="ieee")
            if DROPOUT:
                keep = tl.trans(
                    keep_mask(
                        seed_value,
                        sequence,
                        head,
                        begin + step,
                        start,
                        probability,
                        BLOCK_M,
                        BLOCK_N,
                    )
                )
                grad_weights = tl.where(keep, grad_weights * scale_kept, 0.0)
                kept_weights = tl.where(keep, weights, 0.0).to(grad_tile.dtype)
            else:
                kept_weights = weights.to(grad_tile.dtype)
            acc_v += tl.dot(kept_weights, grad_tile, input_precision="ieee")
            if GUIDED:
                row_grad = tl.load(grad_penalty + m, mask=in_rows, other=0.0)
                token = (step + m) * token_step
                off_diagonal = distance(token[None, :], frame[:, None], narrowness)
                grad_weights += row_grad[None, :] * off_diagonal
                grad_penalty += BLOCK_M
            grad_scores = (weights * (grad_weights - row_delta[None, :])).to(q_tile.dtype)
            acc_k += tl.dot(grad_scores, q_tile, input_precision="ieee")
            if BIAS:
                # A single key has weight 1 whatever its score, so its exact gradient is zero.
                grad_bias = tl.where(length_k == 1, 0.0, grad_scores)
                if b_tile.dtype.is_fp32():
                    # Several warps hold copies of a small tile; all must have read the old values.
                    tl.debug_barrier()
                tl.store(bias + bias_offset, grad_bias.to(grad_scores.dtype), mask=b_mask)
                bias += BLOCK_M * bias_row.to(tl.int64)
            q_rows += BLOCK_M * q_row
            grad_rows += BLOCK_M * out_row
            lse_rows += BLOCK_M
            delta_rows += BLOCK_M

    if DROPOUT:
        acc_v *= scale_kept
    # Located again, as no register is left for it in the loop.
    _, first_k, length_k, start = locate_tile(
        tiles, cu_seqlens_k, sequences, rows_k, tl.program_id(0), BLOCK_N
    )
    in_columns = start + n < length_k
    k_mask = in_columns[:, None] & in_width[None, :]
    # A single key has a zero gradient of its score, as above.
    acc_k *= tl.where(length_k == 1, 0.0, scale)
    grad_begin = (first_k + start) * grad_row + key_head * WIDTH
    k_offset = n[:, None] * grad_row + d[None, :]
    tl.store(grad_v + grad_begin + k_offset, acc_v.to(grad_v.dtype.element_ty), mask=k_mask)
    grad_k += grad_begin
    if ROTARY:
        store_rotated_back(grad_k, acc_k, cos, sin, start, grad_row, in_columns, BLOCK_D, BLOCK_N)
    else:
        tl.store(grad_k + k_offset, acc_k.to(grad_k.dtype.element_ty), mask=k_mask)


@triton.jit(do_not_specialize=["sequences", "rows_q", "left", "right", "chunk"])
def attention_backward_q(
    q,  # (T_q, H, D), a pointer, like all up to `grad_q`; rotated for rotary positions
    k,  # (T_k, H_k, D); rotated for rotary positions
    v,  # (T_k, H_k, D)
    cos,
    sin,  # same shape as `cos`
    cu_seqlens_q,  # int32 (N + 1,)
    cu_seqlens_k,  # int32 (N + 1,)
    seed,  # int64 (1,); None without `DROPOUT`
    tiles,  # int32 (1 + tiles, 4), of queries; see `effasr_kernels.runtime.tiles.locate_tile`
    lse,  # float32 (H, T_q), contiguous, from the forward
    delta,  # float32 (H, T_q), or (2, H, T_q) with ``GUIDED``, from `row_delta`
    grad_out,  # (T_q, H, D), contiguous
    grad_q,  # (T_q, H, D), written, rows contiguous; zeros for rows without keys
    sequences,  # N
    rows_q,  # T_q
    heads,  # H
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    grad_row,
    left,
    right,  # of a context, or None
    chunk,  # of a context, or None
    scale,  # factor of the scores
    probability,  # probability to drop a weight
    narrowness,  # ``1 / (2 sigma^2)`` of `guided_attention`
    WIDTH: tl.constexpr,  # D
    BLOCK_D: tl.constexpr,  # the power of two, at least 16, that D is padded to
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,  # H / H_k, the heads of queries that share a head of keys and values
    CAUSAL: tl.constexpr,  # whether query i attends only to keys 0 to i
    ROTARY: tl.constexpr,  # whether to rotate the gradient back, all of its D = BLOCK_D channels
    DROPOUT: tl.constexpr,  # whether weights are dropped
    GUIDED: tl.constexpr,  # whether there is a gradient of the penalty of `guided_attention`
):
    """Gradient of one tile of queries of one head: program (tile, head)."""
    # It is not used with relative positions; `relative.relative_backward` computes the gradient
    # then.
    sequence, first_q, length_q, start = locate_tile(
        tiles, cu_seqlens_q, sequences, rows_q, tl.program_id(0), BLOCK_M
    )
    if start >= length_q:
        return
    head = tl.program_id(1)
    wide_head = head.to(tl.int64)
    first_k, length_k = find_sequence(cu_seqlens_k, sequences, sequence)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_width = d < WIDTH
    in_rows = start + m < length_q
    q_mask = in_rows[:, None] & in_width[None, :]
    first_row = first_q + start

    q += first_row * q_row + wide_head * q_head
    q_tile = tl.load(q + m[:, None] * q_row + d[None, :], mask=q_mask, other=0.0)
    out_row = heads * WIDTH
    out_begin = (first_row * heads + head) * WIDTH
    out_offset = m[:, None] * out_row + d[None, :]
    grad_tile = tl.load(grad_out + out_begin + out_offset, mask=q_mask, other=0.0)
    # lse = inf makes all weights past the end zero.
    row = wide_head * rows_q + first_row + m
    row_lse = tl.load(lse + row, mask=in_rows, other=float("inf"))
    row_delta = tl.load(delta + row, mask=in_rows, other=0.0)
    if DROPOUT:
        seed_value = tl.load(seed)
        scale_kept = 1 / (1 - probability)

    key_head = wide_head // GROUP
    k += first_k * k_row + key_head * k_head
    v += first_k * v_row + key_head * v_head
    k_offset = n[:, None] * k_row + d[None, :]
    v_offset = n[:, None] * v_row + d[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if GUIDED:
        row_grad = tl.load(delta + rows_q.to(tl.int64) * heads + row, mask=in_rows, other=0.0)
        token = (start + m) * (1.0 / length_q)
        frame_step = 1.0 / tl.maximum(length_k, 1)
    end = tl.minimum(length_k, start + BLOCK_M) if CAUSAL else length_k
    begin = 0
    if chunk is not None:
        begin, end = keys_of_tile(
            start, tl.minimum(start + BLOCK_M, length_q) - 1, end, left, right, chunk, BLOCK_N
        )
        first_visible, end_visible = keys_seen(start + m, left, right, chunk)
        k += begin.to(tl.int64) * k_row
        v += begin.to(tl.int64) * v_row
    for step in range(0, end - begin, BLOCK_N):
        column = begin + step
        in_columns = column + n < length_k
        k_mask = in_columns[:, None] & in_width[None, :]
        k_tile = tl.load(k + k_offset, mask=k_mask, other=0.0)
        v_tile = tl.load(v + v_offset, mask=k_mask, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * (scale * _LOG2_E)
        visible = in_columns[None, :]
        if CAUSAL:
            visible = visible & (start + m[:, None] >= column + n[None, :])
        if chunk is not None:
            key = column + n[None, :]
            visible = visible & (key >= first_visible[:, None]) & (key < end_visible[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        weights = tl.exp2(scores - row_lse[:, None])
        grad_weights = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
        if DROPOUT:
            keep = keep_mask(
                seed_value, sequence, head, start, column, probability, BLOCK_M, BLOCK_N
            )
            grad_weights = tl.where(keep, grad_weights * scale_kept, 0.0)
        if GUIDED:
            frame = (column + n) * frame_step
            off_diagonal = distance(token[:, None], frame[None, :], narrowness)
            grad_weights += row_grad[:, None] * off_diagonal
        grad_scores = (weights * (grad_weights - row_delta[:, None])).to(k_tile.dtype)
        acc += tl.dot(grad_scores, k_tile, input_precision="ieee")
        k += BLOCK_N * k_row
        v += BLOCK_N * v_row

    # A single key has weight 1 whatever its score, so its exact gradient is zero.
    acc *= tl.where(length_k == 1, 0.0, scale)
    grad_q += first_row * grad_row + wide_head * WIDTH
    if ROTARY:
        store_rotated_back(grad_q, acc, cos, sin, start, grad_row, in_rows, BLOCK_D, BLOCK_M)
    else:
        grad_offset = m[:, None] * grad_row + d[None, :]
        tl.store(grad_q + grad_offset, acc.to(grad_q.dtype.element_ty), mask=q_mask)
