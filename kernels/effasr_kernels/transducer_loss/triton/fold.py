"""Sums of a chunk's gradient over states, for frames, and over frames, for states.

`fold` reads each row once and computes both sums of a tile of frames by states; `finish_frames` and
`finish_states` add up the tiles in order. Tile numbers have gaps, as in
`effasr_kernels.runtime.tiles`, so that no table of the first tiles of sequences is needed.
"""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from effasr_kernels.transducer_loss.triton.joint import load_number, search
from effasr_kernels.transducer_loss.triton.plan import Room

FRAMES, STATES, COLUMNS = 8, 32, 128
"""Frames, states and columns of a tile."""

ROWS = 16
"""Frames or states per program of `finish_frames` and `finish_states`."""


def count_sums(nodes: int, frames: int, states: int) -> tuple[int, int]:
    """Rows of ``over_states`` and of ``over_frames`` for a chunk."""
    return nodes // STATES + frames + 1, nodes // FRAMES + states + 1


def count_tiles(room: Room) -> int:
    """Upper bound of the numbers of a chunk's tiles; see `_first_tile`."""
    pairs = room.nodes + (STATES - 1) * room.frames + (FRAMES - 1) * room.states
    return pairs // (FRAMES * STATES) + room.sequences


@triton.jit
def _first_tile(node, frame, state, n, FRAMES, STATES):
    """The number of a sequence's first tile, from what lies before it in the chunk."""
    # f frames of s states have at most (f + FRAMES - 1) (s + STATES - 1) / (FRAMES STATES) tiles.
    # Numbers have gaps, but as many as nodes, frames, states and sequences are worth, however these
    # are distributed.
    pairs = node + (STATES - 1) * frame + (FRAMES - 1) * state
    return (pairs // (FRAMES * STATES)).to(tl.int32) + n


@triton.jit
def _node_of_frame(cu_frames, cu_targets, first_nodes, first_node, n, frame):
    """The node, relative to its chunk, of a frame's first state, and its number of states."""
    states = tl.load(cu_targets + n + 1) - tl.load(cu_targets + n) + 1
    inside = (frame - tl.load(cu_frames + n)).to(tl.int64) * states
    return tl.load(first_nodes + n) - first_node + inside, states


@triton.jit
def _tiles_of_states(
    cu_frames, cu_targets, first_nodes, first_node, first_frame, first_sequence, n, FRAMES
):
    """The first row of a sequence in its chunk's ``over_frames``, its states and first frame."""
    frame = tl.maximum(tl.load(cu_frames + n), first_frame)
    node, states = _node_of_frame(cu_frames, cu_targets, first_nodes, first_node, n, frame)
    state = tl.load(cu_targets + n) + n
    state -= tl.load(cu_targets + first_sequence) + first_sequence
    return node // FRAMES + state, states, frame


@triton.jit(
    do_not_specialize=["first_node", "first_frame", "frames", "first_sequence", "sequences"]
)
def fold(
    hidden,  # (R, J), the activation's output
    d_hidden,  # float32 (R, J), the gradient of `hidden`
    cu_frames,  # int32 (N + 1,)
    cu_targets,  # int32 (N + 1,)
    first_nodes,  # int64 (N + 1,)
    over_states,  # float32, `count_sums` rows of J, written
    over_frames,  # float32, `count_sums` rows of J, written
    first_node,
    first_frame,
    frames,  # number of frames of the chunk
    first_sequence,  # the sequence of the chunk's first frame
    sequences,  # number of sequences with frames in the chunk
    width,  # J
    hidden_stride,
    d_stride,
    TANH: tl.constexpr,  # whether the activation is tanh, else relu
    FRAMES: tl.constexpr,  # frames of a tile
    STATES: tl.constexpr,  # states of a tile
    BLOCK_C: tl.constexpr,
):
    """Compute both sums of one tile of the gradient of the activation's input."""
    # The five numbers of the chunk may be on the device; see `load_number`.
    tile = tl.program_id(0)
    frames, sequences = load_number(frames), load_number(sequences)
    if sequences == 0:
        return
    first_node, first_frame = load_number(first_node), load_number(first_frame)
    first_sequence = load_number(first_sequence)
    chunk_state = tl.load(cu_targets + first_sequence)
    # As in `effasr_kernels.runtime.tiles.find_tile`, for the sequences of the chunk alone.
    index = tl.arange(0, 128)
    count_before = tl.zeros((128,), dtype=tl.int32)
    latest = tl.zeros((128,), dtype=tl.int32)
    for first in range(0, sequences, 128):
        n = first + index
        is_sequence = n < sequences
        sequence = first_sequence + n
        node = tl.load(first_nodes + sequence, mask=is_sequence, other=0) - first_node
        frame = tl.load(cu_frames + sequence, mask=is_sequence, other=0) - first_frame
        state = tl.load(cu_targets + sequence, mask=is_sequence, other=0) - chunk_state + n
        first_tile = _first_tile(
            tl.maximum(node, 0), tl.maximum(frame, 0), state, n, FRAMES, STATES
        )
        is_before = is_sequence & (first_tile <= tile)
        count_before += is_before.to(tl.int32)
        latest = tl.maximum(latest, tl.where(is_before, first_tile, 0))
    n = first_sequence + tl.sum(count_before) - 1
    begin = tl.maximum(tl.load(cu_frames + n), first_frame)
    end = tl.minimum(tl.load(cu_frames + n + 1), first_frame + frames)
    to_states, states, _ = _tiles_of_states(
        cu_frames, cu_targets, first_nodes, first_node, first_frame, first_sequence, n, FRAMES
    )
    strips = (states + STATES - 1) // STATES
    inside = tile - tl.max(latest, axis=0)
    number = inside // strips
    strip = inside - number * strips
    start = begin + number * FRAMES
    first_state = strip * STATES
    if start >= end:
        return

    frame = start + tl.arange(0, FRAMES)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_frame = frame < end
    mask = is_frame[:, None] & (column < width)[None, :]
    node, _ = _node_of_frame(cu_frames, cu_targets, first_nodes, first_node, n, frame)
    row = node + first_state
    h_tile = hidden + row[:, None] * hidden_stride + column[None, :]
    d_tile = d_hidden + row[:, None] * d_stride + column[None, :]
    to_states += number.to(tl.int64) * states + first_state
    to_states = over_frames + to_states * width + column
    total = tl.zeros((FRAMES, BLOCK_C), tl.float32)
    for _ in range(first_state, tl.minimum(first_state + STATES, states)):
        h = tl.load(h_tile, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(d_tile, mask=mask, other=0.0)
        if TANH:
            d *= 1.0 - h * h
        else:
            d = tl.where(h > 0.0, d, 0.0)
        total += d
        tl.store(to_states, tl.sum(d, axis=0), mask=column < width)
        h_tile += hidden_stride
        d_tile += d_stride
        to_states += width
    index_of_sum = node // STATES + (frame - first_frame) + strip
    tl.store(over_states + index_of_sum[:, None] * width + column[None, :], total, mask=mask)


@triton.jit(do_not_specialize=["first_node", "first_frame", "frames", "sequences", "steps"])
def finish_frames(
    cu_frames,  # int32 (N + 1,)
    cu_targets,  # int32 (N + 1,)
    first_nodes,  # int64 (N + 1,)
    over_states,  # as `fold` wrote it
    d_encoded,  # (T, J), contiguous, written
    first_node,
    first_frame,
    frames,  # number of frames of the chunk
    sequences,  # N
    steps,
    width,  # J
    STATES: tl.constexpr,  # states of a tile
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write the gradient of ``encoded`` for the frames of a chunk."""
    # The chunk's first node, first frame and frames may be on the device; see `load_number`.
    frames = load_number(frames)
    if tl.program_id(0) * BLOCK_R >= frames:
        return
    first_node, first_frame = load_number(first_node), load_number(first_frame)
    inside = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_frame = inside < frames
    frame = first_frame + tl.minimum(inside, frames - 1)
    n = search(cu_frames, 0, frame, sequences, steps)
    node, states = _node_of_frame(cu_frames, cu_targets, first_nodes, first_node, n, frame)
    tiles = tl.where(is_frame, (states + STATES - 1) // STATES, 0)
    index = (node // STATES + (frame - first_frame))[:, None] * width + column[None, :]
    within = (column < width)[None, :]
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for tile in range(0, tl.max(tiles, axis=0)):
        mask = (tile < tiles)[:, None] & within
        total += tl.load(over_states + index, mask=mask, other=0.0)
        index += width
    out = d_encoded + frame.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out, total.to(d_encoded.dtype.element_ty), mask=is_frame[:, None] & within)


@triton.jit(
    do_not_specialize=[
        *("first_node", "first_frame", "frames", "first_sequence", "first_state", "states"),
        *("group_state", "sequences", "steps"),
    ]
)
def finish_states(
    cu_frames,  # int32 (N + 1,)
    cu_targets,  # int32 (N + 1,)
    first_nodes,  # int64 (N + 1,)
    over_frames,  # as `fold` wrote it
    d_predicted,  # float32 (S, J), of the group's states, contiguous, added to
    first_node,
    first_frame,
    frames,  # number of frames of the chunk
    first_sequence,  # the first that the chunk touches
    first_state,  # the first row of `predicted` of that sequence
    states,  # rows of `predicted` of all sequences that the chunk touches
    group_state,  # the group's first row of `predicted`
    sequences,  # N
    steps,
    width,  # J
    FRAMES: tl.constexpr,  # frames of a tile
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Add the sums of a chunk to the gradient of ``predicted`` for its states."""
    # The six numbers of the chunk may be on the device; see `load_number`.
    states = load_number(states)
    if tl.program_id(0) * BLOCK_R >= states:
        return
    first_node, first_frame, frames = (
        load_number(first_node),
        load_number(first_frame),
        load_number(frames),
    )
    first_sequence, first_state = load_number(first_sequence), load_number(first_state)
    inside = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_state = inside < states
    state = first_state + tl.minimum(inside, states - 1)
    n = search(cu_targets, 1, state, sequences, steps)
    index, count, begin = _tiles_of_states(
        cu_frames, cu_targets, first_nodes, first_node, first_frame, first_sequence, n, FRAMES
    )
    end = tl.minimum(tl.load(cu_frames + n + 1), first_frame + frames)
    tiles = tl.where(is_state, (end - begin + FRAMES - 1) // FRAMES, 0)
    index += state - (tl.load(cu_targets + n) + n)
    within = (column < width)[None, :]
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for tile in range(0, tl.max(tiles, axis=0)):
        mask = (tile < tiles)[:, None] & within
        source = over_frames + index[:, None] * width + column[None, :]
        total += tl.load(source, mask=mask, other=0.0)
        index += count
    out = d_predicted + (state - group_state).to(tl.int64)[:, None] * width + column[None, :]
    mask = is_state[:, None] & within
    tl.store(out, tl.load(out, mask=mask, other=0.0) + total, mask=mask)
