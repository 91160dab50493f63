"""Rows of the joint's output, one for each node of a chunk, and the logits that lattices need."""

import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.runtime.launch import ceil_div, launch
from effasr_kernels.transducer_loss.triton.plan import Chunk


@triton.jit
def load_number(x):
    """A number of a chunk: an int argument, or the int32 to which a pointer argument points."""
    if x.dtype.is_ptr():
        return tl.load(x)
    else:
        return x


@triton.jit
def search(offsets, spacing, value, sequences, steps):
    """The last n in [0, N] with ``offsets[n] + spacing * n <= value``, for each value."""
    low = value.to(tl.int32) * 0
    high = low + sequences
    for _ in range(0, steps):
        middle = (low + high + 1) // 2
        is_past = tl.load(offsets + middle) + spacing * middle > value
        high = tl.where(is_past, tl.maximum(middle - 1, low), high)
        low = tl.where(is_past, low, middle)
    return low


@triton.jit(do_not_specialize=["first_node", "nodes", "first_frame", "sequences", "steps"])
def place_nodes(
    cu_frames,  # int32 (N + 1,)
    cu_targets,  # int32 (N + 1,)
    first_nodes,  # int64 (N + 1,), of `_plan.first_nodes`
    targets,  # int32 or int64 (U,)
    frame_rows,  # int32 (R,), written: the row of `encoded`
    state_rows,  # int32 (R,), written: the row of `predicted`
    labels,  # int32 (R,), written: next label; -1 in the last state, -2 for an invalid one
    first_node,  # the chunk's first node; see `load_number`, also for the next two
    nodes,  # number of nodes of the chunk, at most R
    first_frame,
    sequences,  # N
    steps,
    BLOCK: tl.constexpr,
):
    """Compute the frame, the state and the label of each node of a chunk."""
    nodes = load_number(nodes)
    if tl.program_id(0) * BLOCK >= nodes:
        return
    first_node, first_frame = load_number(first_node), load_number(first_frame)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_node = row < nodes
    node = tl.minimum(row, nodes - 1) + first_node.to(tl.int64)
    n = search(first_nodes, 0, node, sequences, steps)
    # The first frame of the sequence in this chunk; from there 32 bits suffice.
    frame = tl.maximum(tl.load(cu_frames + n), first_frame)
    inside = (node - tl.maximum(tl.load(first_nodes + n), first_node)).to(tl.int32)
    label = tl.load(cu_targets + n)
    count = tl.load(cu_targets + n + 1) - label
    t = inside // (count + 1)
    u = inside - t * (count + 1)
    tl.store(frame_rows + row, frame + t, mask=is_node)
    tl.store(state_rows + row, label + n + u, mask=is_node)
    label_class = tl.load(targets + label + u, mask=is_node & (u < count), other=-1).to(tl.int32)
    tl.store(labels + row, tl.where((u < count) & (label_class < 0), -2, label_class), mask=is_node)


@triton.jit
def _activate(x, TANH: tl.constexpr):
    if TANH:
        small = tl.exp(-2.0 * tl.abs(x))
        size = (1.0 - small) / (1.0 + small)
        # Near zero the difference above loses precision.
        square = x * x
        series = 1.0 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315)))
        return tl.where(tl.abs(x) < 0.2, x * series, tl.where(x < 0.0, -size, size))
    # NaN stays NaN.
    return tl.where(x < 0.0, 0.0, x)


@triton.jit(do_not_specialize=["first_node", "nodes", "rows", "count", "blank_id"])
def join(
    encoded,  # (T, J)
    predicted,  # (U + N, J)
    frame_rows,  # int32 (R,), of `place_nodes`
    state_rows,  # int32 (R,)
    labels,  # int32 (R,)
    # float32, of the group's nodes. If it and ``occ_label`` are zero, the row is set to zero, as
    # its sequence may hold NaN. None to compute all rows.
    occ_blank,
    occ_label,  # float32
    weight,  # (V, ...), with zeros past J
    bias,  # (V,)
    blank_logit,  # float32, of the group's nodes, written; None to skip the logits
    label_logit,  # float32, of the group's nodes, written: -inf in the last state, NaN if invalid
    hidden,  # (R, ...), written, with zeros past J up to a multiple of `BLOCK_C`
    first_node,  # the chunk's first node, relative to the group's first; see `load_number`
    nodes,  # number of nodes of the chunk; see `load_number`
    rows,  # rows to write, at least `nodes`: those past the nodes are set to zero
    width,  # J
    count,  # V
    blank_id,  # the blank's class
    encoded_stride,
    predicted_stride,
    weight_stride,
    hidden_stride,
    TANH: tl.constexpr,  # whether the activation is tanh, else relu
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute the rows act(f_t + g_u) of a chunk and their logits of the blank and the label."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_C)
    is_node = row < load_number(nodes)
    node = load_number(first_node).to(tl.int64) + row
    alive = is_node
    if occ_blank is not None:
        occupied = tl.load(occ_blank + node, mask=is_node, other=0.0) != 0.0
        alive = occupied | (tl.load(occ_label + node, mask=is_node, other=0.0) != 0.0)
    f_row = tl.load(frame_rows + row, mask=is_node, other=0).to(tl.int64)
    g_row = tl.load(state_rows + row, mask=is_node, other=0).to(tl.int64)
    f_tile = encoded + f_row[:, None] * encoded_stride + column[None, :]
    g_tile = predicted + g_row[:, None] * predicted_stride + column[None, :]
    h_tile = hidden + row[:, None] * hidden_stride + column[None, :]
    label_class = tl.full((BLOCK_R,), -1, tl.int32)
    exists = label_class >= 0
    to_blank = tl.zeros((BLOCK_R,), tl.float32)
    to_label = tl.zeros((BLOCK_R,), tl.float32)
    if blank_logit is not None:
        label_class = tl.load(labels + row, mask=is_node, other=-1)
        exists = (label_class >= 0) & (label_class < count)
        to_blank += tl.load(bias + blank_id).to(tl.float32)
        to_label = tl.load(bias + label_class, mask=exists, other=0.0).to(tl.float32)
    blank_row = weight + tl.cast(blank_id, tl.int64) * weight_stride + column
    label_tile = weight + label_class.to(tl.int64)[:, None] * weight_stride + column[None, :]
    for c in range(0, width, BLOCK_C):
        inside = alive[:, None] & (c + column < width)[None, :]
        f = tl.load(f_tile + c, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_tile + c, mask=inside, other=0.0).to(tl.float32)
        h = _activate(f + g, TANH).to(hidden.dtype.element_ty)
        tl.store(h_tile + c, h, mask=(row < rows)[:, None])
        if blank_logit is not None:
            h = h.to(tl.float32)
            to_blank += tl.sum(h * tl.load(blank_row + c).to(tl.float32)[None, :], axis=1)
            w = tl.load(label_tile + c, mask=exists[:, None], other=0.0).to(tl.float32)
            to_label += tl.sum(h * w, axis=1)
    if blank_logit is not None:
        tl.store(blank_logit + node, to_blank, mask=is_node)
        to_label = tl.where(
            label_class == -1, float("-inf"), tl.where(exists, to_label, float("nan"))
        )
        tl.store(label_logit + node, to_label, mask=is_node)


@triton.jit(do_not_specialize=["first", "first_normalizer", "nodes", "sigma"])
def normalize(
    log_normalizers,  # float32 (R,)
    blank,  # float32, of the group's nodes, changed
    label,  # float32, of the group's nodes, changed
    normalizer,  # float32, written: the normalizers; it may be `log_normalizers`
    first,  # index of the chunk's first node in `blank` and `label`; see `load_number`
    first_normalizer,  # index of the chunk's first node in `normalizer`; see `load_number`
    nodes,  # number of nodes of the chunk; see `load_number`
    sigma,  # subtracted in addition
    BLOCK: tl.constexpr,
):
    """Subtract the normalizers of a chunk's rows from its logits of blank and label."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_node = row < load_number(nodes)
    row_normalizer = tl.load(log_normalizers + row, mask=is_node, other=0.0)
    tl.store(
        normalizer + load_number(first_normalizer).to(tl.int64) + row, row_normalizer, mask=is_node
    )
    row_normalizer += sigma
    node = load_number(first).to(tl.int64) + row
    tl.store(
        blank + node, tl.load(blank + node, mask=is_node, other=0.0) - row_normalizer, mask=is_node
    )
    tl.store(
        label + node, tl.load(label + node, mask=is_node, other=0.0) - row_normalizer, mask=is_node
    )


ROWS = 64
"""Rows of a program."""
_NARROWEST = 16
"""Minimum columns of a product."""


def score_durations(
    hidden: Tensor,  # (R, ...), rows of the joint's output, padded like `weight`
    weight: Tensor,  # (V + D, ...), rows padded to whole blocks
    bias: Tensor,  # (V + D,)
    log_duration: Tensor,  # float32 (nodes, D), contiguous, written
    base: int,  # node of the first element of `log_duration`
    chunk: Chunk,
    count: int,  # V
    block: int,  # columns per step
) -> None:
    """Write the log-softmax of the duration logits of a chunk's nodes."""
    durations = log_duration.shape[1]
    launch(
        score,
        (ceil_div(chunk.room.nodes, ROWS),),
        *(hidden, weight, bias, log_duration, chunk.node_from(base), chunk.nodes, count),
        *(hidden.stride(0), weight.stride(0)),
        num_warps=4,
        num_stages=2,
        WIDTH=weight.shape[1],
        DURATIONS=durations,
        BLOCK_R=ROWS,
        BLOCK_D=max(_NARROWEST, 1 << (durations - 1).bit_length()),
        BLOCK_C=block,
    )


@triton.jit(do_not_specialize=["first_node", "nodes", "count"])
def score(
    hidden,
    weight,
    bias,
    log_duration,
    first_node,
    nodes,
    count,
    hidden_stride,
    weight_stride,
    WIDTH: tl.constexpr,
    DURATIONS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile of rows; see `score_durations`."""
    first_row = tl.program_id(0) * BLOCK_R
    nodes = load_number(nodes)
    if first_row >= nodes:
        return
    in_rows = tl.arange(0, BLOCK_R)
    in_width = tl.arange(0, BLOCK_C)
    d = tl.arange(0, BLOCK_D)
    # Rows and durations past the end load the last one, unmasked; their results are not stored.
    h_tile = hidden + first_row.to(tl.int64) * hidden_stride + in_width[None, :]
    h_tile += tl.minimum(in_rows, nodes - 1 - first_row)[:, None] * hidden_stride
    w_tile = weight + tl.cast(count, tl.int64) * weight_stride + in_width[None, :]
    w_tile += tl.minimum(d, DURATIONS - 1)[:, None] * weight_stride
    start = tl.load(bias + count + d, mask=d < DURATIONS, other=float("-inf")).to(tl.float32)
    z = tl.zeros((BLOCK_R, BLOCK_D), tl.float32) + start[None, :]
    for c in range(0, WIDTH, BLOCK_C):
        z = tl.dot(tl.load(h_tile + c), tl.trans(tl.load(w_tile + c)), z, input_precision="ieee")
    largest = tl.max(z, axis=1)
    # Where all logits are -inf, the difference to their maximum would be NaN.
    pivot = tl.where(largest == float("-inf"), 0.0, largest)
    normalizer = pivot + tl.log(tl.sum(tl.exp(z - pivot[:, None]), axis=1))
    row = first_row + in_rows
    node = tl.cast(load_number(first_node), tl.int64) + row
    stored = (row < nodes)[:, None] & (d < DURATIONS)[None, :]
    out = log_duration + node[:, None] * DURATIONS + d[None, :]
    tl.store(out, z - normalizer[:, None], mask=stored)
