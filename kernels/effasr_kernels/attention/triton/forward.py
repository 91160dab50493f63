"""The forward kernel of attention."""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from effasr_kernels.attention.triton.context import groups_seen, keys_of_tile, keys_seen
from effasr_kernels.attention.triton.rotary import load_rotated
from effasr_kernels.runtime.tiles import find_sequence, locate_tile
from effasr_kernels.shared.philox import keep_mask

# Below this, 1 - exp(-x) loses digits that five terms of its series keep.
_SMALL = tl.constexpr(0.2)


@triton.jit
def distance(token, frame, narrowness):
    """The distance from the diagonal: ``1 - exp(-narrowness (token - frame)^2)``."""
    apart = token - frame
    x = apart * apart * narrowness
    series = x * (1 + x * (-1 / 2 + x * (1 / 6 + x * (-1 / 24 + x * (1 / 120)))))
    return tl.where(x < _SMALL, series, 1 - tl.exp(-x))


@triton.jit
def add_content_bias(x, content_bias, d, in_width):
    """Add the content bias of a head, (D,), to a tile of queries, (M, D), in float32."""
    bias = tl.load(content_bias + d, mask=in_width, other=0.0)
    return (x.to(tl.float32) + bias.to(tl.float32)[None, :]).to(x.dtype)


@triton.jit
def as_scores(b_tile):
    """Convert a tile of the bias to a float32 accumulator of the scores."""
    # A 16-bit tile is multiplied by the identity on tensor cores, which is exact and reads the tile
    # from shared memory directly; threads that read it in the layout of the scores would have
    # four-way bank conflicts. A number that is not finite spreads to its row of the tile, so
    # columns outside the sequence must be finite.
    if b_tile.dtype.is_fp32():
        scores = b_tile
    else:
        n = tl.arange(0, b_tile.shape[1])
        scores = tl.dot(b_tile, (n[:, None] == n[None, :]).to(b_tile.dtype))
    return scores


@triton.jit(do_not_specialize=["sequences", "rows_q", "bias_eighths", "left", "right", "chunk"])
def attention_forward(
    content_bias,  # (H, D), added to ``q``, or None; a pointer, like all up to ``penalty``
    q,  # (T_q, H, D)
    k,  # (T_k, H_k, D); rotated for rotary positions
    v,  # (T_k, H_k, D)
    # (T_q, H, W), contiguous, added to the products of queries and keys; finite up to the next
    # multiple of 8 columns. None without ``BIAS``.
    bias,
    cos,  # float32 (positions, D / 2), contiguous; None without `ROTARY`
    sin,  # same shape as `cos`
    cu_seqlens_q,  # int32 (N + 1,)
    cu_seqlens_k,  # int32 (N + 1,)
    seed,  # int64 (1,); None without `DROPOUT`
    tiles,  # int32 (1 + tiles, 4), of `layout_q`; see `effasr_kernels.runtime.tiles.locate_tile`
    out,  # (T_q, H, D), contiguous, written; zeros for rows without keys
    lse,  # float32 (H, T_q), written: log2 of each row's sum of powers of two; -inf without keys
    penalty,  # float32 (T_q, H), written: mean distance from the diagonal; None unless ``GUIDED``
    sequences,  # N
    rows_q,  # T_q
    bias_eighths,  # W / 8
    heads,  # H
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    left,  # of a context; see `effasr_kernels.attention.triton.context`. None without.
    right,  # of a context, or None
    chunk,  # of a context, or None
    scale_log2,  # factor of the scores, for powers of two
    probability,  # probability to drop a weight
    narrowness,  # ``1 / (2 sigma^2)`` of `guided_attention`
    WIDTH: tl.constexpr,  # D
    BLOCK_D: tl.constexpr,  # the power of two, at least 16, that D is padded to
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,  # H / H_k, the heads of queries that share a head of keys and values
    CAUSAL: tl.constexpr,  # whether query i attends only to keys 0 to i
    BIAS: tl.constexpr,  # whether scores and queries have a bias
    ROTARY: tl.constexpr,  # whether to rotate all D = BLOCK_D channels of ``q`` by its position
    DROPOUT: tl.constexpr,  # whether weights are dropped
    GUIDED: tl.constexpr,  # whether to compute the penalty of `guided_attention`
):
    """Compute the output of one tile of queries of one head: program (tile, head)."""
    # The softmax is computed online, as in FlashAttention-2 (https://arxiv.org/abs/2307.08691), in
    # powers of two. Without a context every query attends to the first key, so the largest score is
    # finite after one step. With ``GUIDED`` there is one more sum: the weights times their distance
    # from the diagonal.
    sequence, first_q, length_q, start = locate_tile(
        tiles, cu_seqlens_q, sequences, rows_q, tl.program_id(0), BLOCK_M
    )
    if start >= length_q:
        return
    head = tl.program_id(1)
    wide_head = head.to(tl.int64)
    key_head = wide_head // GROUP
    first_k, length_k = find_sequence(cu_seqlens_k, sequences, sequence)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_width = d < WIDTH
    in_rows = start + m < length_q
    q_mask = in_rows[:, None] & in_width[None, :]
    first_row = first_q + start

    q += first_row * q_row + wide_head * q_head
    if ROTARY:
        q_tile = load_rotated(q, cos, sin, start, q_row, in_rows, BLOCK_D, BLOCK_M)
    else:
        q_tile = tl.load(q + m[:, None] * q_row + d[None, :], mask=q_mask, other=0.0)
    if BIAS:
        q_tile = add_content_bias(q_tile, content_bias + wide_head * WIDTH, d, in_width)
        bias_row = heads * bias_eighths * 8
        bias += first_row * bias_row + wide_head * (bias_eighths * 8)
        bias_offset = m[:, None] * bias_row + n[None, :]
        # The mask is constant within vectors of 8, so that loads are vectorized; W is a multiple.
        by_eight = n // 8 * 8
    if DROPOUT:
        seed_value = tl.load(seed)

    k += first_k * k_row + key_head * k_head
    v += first_k * v_row + key_head * v_head
    k_offset = n[:, None] * k_row + d[None, :]
    v_offset = n[:, None] * v_row + d[None, :]
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if GUIDED:
        off_diagonal_sum = tl.zeros((BLOCK_M,), tl.float32)
        token = (start + m) * (1.0 / length_q)
        frame_step = 1.0 / tl.maximum(length_k, 1)
    end = tl.minimum(length_k, start + BLOCK_M) if CAUSAL else length_k
    begin = 0
    if chunk is not None:
        begin, end = keys_of_tile(
            start, tl.minimum(start + BLOCK_M, length_q) - 1, end, left, right, chunk, BLOCK_N
        )
        first_visible, end_visible = keys_seen(start + m, left, right, chunk)
        if BIAS:
            first_group, end_group = groups_seen(start + m, left, right, chunk)
        k += begin.to(tl.int64) * k_row
        v += begin.to(tl.int64) * v_row
    # From zero, as otherwise the compiler does not prefetch.
    for step in range(0, end - begin, BLOCK_N):
        column = begin + step
        in_columns = column + n < length_k
        k_mask = in_columns[:, None] & in_width[None, :]
        k_tile = tl.load(k + k_offset, mask=k_mask, other=0.0)
        if BIAS:
            b_mask = in_rows[:, None] & (column + by_eight < length_k)[None, :]
            if chunk is not None:
                group = (column + by_eight)[None, :]
                b_mask = b_mask & (group >= first_group[:, None]) & (group < end_group[:, None])
            b_tile = tl.load(bias + column + bias_offset, mask=b_mask, other=0.0)
            scores = tl.dot(q_tile, tl.trans(k_tile), as_scores(b_tile), input_precision="ieee")
        else:
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        visible = in_columns[None, :]
        if CAUSAL:
            visible = visible & (start + m[:, None] >= column + n[None, :])
        if chunk is not None:
            key = column + n[None, :]
            visible = visible & (key >= first_visible[:, None]) & (key < end_visible[:, None])
        scores = tl.where(visible, scores * scale_log2, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        pivot = larger
        if chunk is not None:
            # A query may see nothing of the first tiles.
            pivot = tl.where(larger == float("-inf"), 0.0, larger)
        shrink = tl.exp2(largest - pivot)
        weights = tl.exp2(scores - pivot[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if GUIDED:
            frame = (column + n) * frame_step
            off_diagonal = distance(token[:, None], frame[None, :], narrowness)
            off_diagonal_sum = off_diagonal_sum * shrink + tl.sum(weights * off_diagonal, 1)
        if DROPOUT:
            keep = keep_mask(
                seed_value, sequence, head, start, column, probability, BLOCK_M, BLOCK_N
            )
            weights = tl.where(keep, weights, 0.0)
        v_tile = tl.load(v + v_offset, mask=k_mask, other=0.0)
        acc = acc * shrink[:, None]
        acc += tl.dot(weights.to(v_tile.dtype), v_tile, input_precision="ieee")
        largest = larger
        k += BLOCK_N * k_row
        v += BLOCK_N * v_row

    # For a row without keys the sum is 0 and the output stays zero.
    total = tl.where(total == 0, 1.0, total)
    inverse = 1 / total
    if GUIDED:
        tl.store(penalty + (first_row + m) * heads + head, off_diagonal_sum * inverse, mask=in_rows)
    if DROPOUT:
        inverse *= 1 / (1 - probability)
    acc *= inverse[:, None]
    out += (first_row * heads + head) * WIDTH
    out_offset = m[:, None] * (heads * WIDTH) + d[None, :]
    tl.store(out + out_offset, acc.to(out.dtype.element_ty), mask=q_mask)
    tl.store(lse + wide_head * rows_q + first_row + m, largest + tl.log2(total), mask=in_rows)
