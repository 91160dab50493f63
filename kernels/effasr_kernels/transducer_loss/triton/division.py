"""Division of the nodes of a batch of a static shape into chunks, on the device.

The host knows how many nodes a batch has at most, and how many states a frame. It divides this
capacity into equal *strides*; chunk i has the frames with a first node in stride i. A chunk
therefore has at most one stride of nodes and the rest of its last frame, whatever the lengths are,
and no chunk depends on another. The kernel `divide` finds the frames; the kernels of a chunk read
their numbers from memory, and their programs past the end return early. All sequences are one
group.
"""

# pyright: reportGeneralTypeIssues=false
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.launch import ceil_div, launch
from effasr_kernels.transducer_loss.triton.joint import search
from effasr_kernels.transducer_loss.triton.plan import Chunk, Cost, Group, Room

_FIELDS = tl.constexpr(8)
_PITCH = tl.constexpr(4)
"""Elements between the numbers of a chunk, to align each to 16 bytes."""
_BLOCK = 32


class Strides(NamedTuple):
    chunks: int
    nodes: int  # nodes of a stride
    room: int  # largest number of nodes of a chunk


def strides(capacity: int, widest: int, room: int) -> Strides:
    """Divide a capacity into equal strides, of at least one frame's nodes."""
    max_nodes = max(room - widest + 1, widest)
    chunks = max(1, ceil_div(capacity, max_nodes))
    nodes = ceil_div(capacity, chunks)
    return Strides(chunks, nodes, min(capacity, nodes + widest - 1))


class DeviceLattices:
    """The lattices of a batch with lengths only on the device; see `plan.Lattices`."""

    def __init__(
        self,
        layout_frames: PackedLayout,  # layout of ``encoded``
        layout_targets: PackedLayout,  # layout of the targets, with a bound of their lengths
        offsets: tuple[Tensor, Tensor, Tensor],  # of frames, targets (int32) and nodes (int64)
        max_nodes: int,  # most nodes of a batch
    ):
        """Keep the offsets, which are read on the device."""
        self._frames, self._targets = layout_frames, layout_targets
        self._offsets, self._capacity = offsets, max_nodes
        self.sequences = layout_frames.num_sequences
        self._states = layout_targets.rows + self.sequences
        self._widest = layout_targets.max_seqlen_bound + 1

    def groups(self, cost: Cost, size: int, chunk_cost: Cost, chunk_size: int) -> Iterator[Group]:
        """Divide all nodes into chunks of one group; ``cost`` and ``size`` have no effect."""
        fixed = chunk_cost.frame * self._frames.rows + chunk_cost.state * self._states
        nodes = max(chunk_size - fixed, chunk_size // 2) // chunk_cost.node
        parts = strides(self._capacity, self._widest, nodes)
        room = Room(
            nodes=parts.room,
            frames=min(self._frames.rows, parts.room),
            sequences=self.sequences,
            states=self._states,
        )
        chunks: tuple[Chunk, ...] = ()
        # With a capacity of zero, no sequence has a frame.
        if parts.nodes:
            rows = self._table(parts)[..., 0].unbind()
            chunks = tuple(Chunk(*row.unbind(), room=room) for row in rows)
        yield Group(
            *(0, self.sequences, 0, self._frames.rows, 0, self._capacity, 0, self._states), chunks
        )

    def clear_tails(self, encoded: Tensor, predicted: Tensor) -> None:
        encoded.masked_fill_(~self._frames.mask()[:, None], 0)
        predicted.masked_fill_(~self._targets.lengthened(1).mask()[:, None], 0)

    def _table(self, parts: Strides) -> Tensor:
        """The numbers of each chunk: int32 (chunks, 8, 4), only [..., 0] of which is used."""
        size = parts.chunks, _FIELDS.value, _PITCH.value
        table = torch.empty(size, dtype=torch.int32, device=self._frames.device)
        launch(
            divide,
            (ceil_div(parts.chunks, _BLOCK),),
            *(*self._offsets, table, parts.chunks, parts.nodes),
            *(self.sequences, self.sequences.bit_length()),
            num_warps=1,
            num_stages=1,
            BLOCK=_BLOCK,
        )
        return table


@triton.jit
def _start(cu_frames, cu_targets, first_nodes, value, sequences, steps):
    """The first frame with a first node of at least ``value``, and that node."""
    last = tl.load(first_nodes + sequences) - 1
    n = search(first_nodes, 0, tl.minimum(value, tl.maximum(last, 0)), sequences, steps)
    # Of sequences without nodes there may be no next one.
    n = tl.minimum(n, sequences - 1)
    states = tl.load(cu_targets + n + 1) - tl.load(cu_targets + n) + 1
    inside = value - tl.load(first_nodes + n)
    skipped = tl.minimum((inside + states - 1) // states, _length(cu_frames, n))
    frame = tl.load(cu_frames + n) + skipped
    return frame, tl.load(first_nodes + n) + skipped * states


@triton.jit
def _length(offsets, n):
    return tl.load(offsets + n + 1) - tl.load(offsets + n)


@triton.jit(do_not_specialize=["chunks", "nodes", "sequences", "steps"])
def divide(
    cu_frames,  # int32 (N + 1,)
    cu_targets,  # int32 (N + 1,)
    first_nodes,  # int64 (N + 1,)
    table,  # int32 (chunks, 8, 4); only [..., 0] is written
    chunks,
    nodes,  # nodes of a stride
    sequences,  # N, at least 1
    steps,
    BLOCK: tl.constexpr,
):
    """Write the numbers of some chunks, in the order of `plan.Chunk`."""
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_chunk = chunk < chunks
    value = chunk.to(tl.int64) * nodes
    frame, node = _start(cu_frames, cu_targets, first_nodes, value, sequences, steps)
    stop, past = _start(cu_frames, cu_targets, first_nodes, value + nodes, sequences, steps)
    has_frames = is_chunk & (stop > frame)
    first = search(cu_frames, 0, tl.where(has_frames, frame, 0), sequences, steps)
    last = search(cu_frames, 0, tl.where(has_frames, stop - 1, 0), sequences, steps)
    first, last = tl.where(has_frames, first, 0), tl.where(has_frames, last, 0)
    state = tl.load(cu_targets + first) + first
    states = tl.load(cu_targets + last + 1) + last + 1 - state
    out = table + chunk * _FIELDS * _PITCH
    tl.store(out, frame.to(tl.int32), mask=is_chunk)
    tl.store(out + _PITCH, tl.where(has_frames, stop - frame, 0).to(tl.int32), mask=is_chunk)
    tl.store(out + 2 * _PITCH, node.to(tl.int32), mask=is_chunk)
    tl.store(out + 3 * _PITCH, tl.where(has_frames, past - node, 0).to(tl.int32), mask=is_chunk)
    tl.store(out + 4 * _PITCH, first, mask=is_chunk)
    tl.store(out + 5 * _PITCH, tl.where(has_frames, last - first + 1, 0), mask=is_chunk)
    tl.store(out + 6 * _PITCH, state, mask=is_chunk)
    tl.store(out + 7 * _PITCH, tl.where(has_frames, states, 0), mask=is_chunk)
