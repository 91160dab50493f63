"""Division of the nodes of a batch of lattices into groups and chunks that fit the workspace.

Nodes are numbered sequence by sequence, then frame by frame: node (t, u) of sequence n is number
``first_nodes[n] + t (U_n + 1) + u``. A *group* is a range of whole sequences; their lattices are
summed in one launch; a *chunk* is a range of whole frames of a group; its rows are multiplied in
one product. A frame has a row for each state of its sequence, so its gradient is complete within
its chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout

Number = int | Tensor
"""A number that the host knows; or int32 (), on the device."""


class Room(NamedTuple):
    """Upper bounds of the numbers of a chunk, by which the host sizes buffers and grids."""

    nodes: int
    frames: int
    sequences: int
    states: int


@dataclass(frozen=True, slots=True)
class Chunk:
    first_frame: Number  # its first row of `encoded`
    frames: Number
    first_node: Number
    nodes: Number
    first_sequence: Number  # the sequence of its first frame
    sequences: Number  # number of sequences from its first to its last frame, including empty ones
    first_state: Number  # the first row of `predicted` of the first sequence
    states: Number  # rows of `predicted` of all these sequences
    room: Room  # their upper bounds; equal to them if the host knows the lengths

    def node_from(self, base: int) -> Number:
        """Its first node, counted from node ``base``."""
        return self.first_node - base if base else self.first_node

    def part(self, base: int) -> slice:
        """Its nodes among those from node ``base`` on, if the host knows them."""
        if isinstance(self.first_node, Tensor):
            raise TypeError("The nodes of this chunk are only on the device.")
        first = self.first_node - base
        return slice(first, first + self.room.nodes)


@dataclass(frozen=True, slots=True)
class Group:
    first_sequence: int
    sequences: int
    first_frame: int  # its first row of `encoded`
    frames: int
    first_node: int
    nodes: int
    first_state: int  # its first row of `predicted`
    states: int
    chunks: tuple[Chunk, ...]  # the chunks of its frames


class Scores(NamedTuple):
    """A float32 number for each step out of each node.

    The numbers are log-probabilities in the forward, and occupancies in the backward.
    """

    base: int  # node of the first elements
    blank: Tensor  # (R,)
    label: Tensor  # (R,)
    duration: Tensor | None = None  # (R, D), steps with each duration, or logit gradients


class Trace(NamedTuple):
    """The numbers of the nodes that the forward recursion stores for the backward."""

    base: int  # node of the first element
    values: Tensor  # (R,)


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes per node, per frame and per state (row of ``predicted``)."""

    node: int
    frame: int = 0
    state: int = 0

    def of(self, frames: int, states: int) -> int:
        return self.node * frames * states + self.frame * frames + self.state * states


class Lattices:
    """The sizes of the lattices of a batch, on the host.

    The lengths are read once. If only the device holds them, as in compiled code, this waits for
    the device; `division.DeviceLattices` does not.
    """

    def __init__(self, layout_frames: PackedLayout, layout_targets: PackedLayout):
        """Read the lengths."""
        self.frames = list(layout_frames.cu_seqlens_host)
        labels = layout_targets.cu_seqlens_host
        self.states = [offset + n for n, offset in enumerate(labels)]
        self.sequences = len(self.frames) - 1
        self.nodes = [0]
        for n in range(self.sequences):
            self.nodes.append(self.nodes[n] + self._frames(n) * self._states(n))

    @property
    def largest(self) -> int:
        """Largest number of nodes of a sequence."""
        pairs = zip(self.nodes[1:], self.nodes[:-1], strict=True)
        return max((end - begin for end, begin in pairs), default=0)

    def groups(self, cost: Cost, size: int, chunk_cost: Cost, chunk_size: int) -> Iterator[Group]:
        begin, used = 0, 0
        for n in range(self.sequences):
            needed = cost.of(self._frames(n), self._states(n))
            if n > begin and used + needed > size:
                yield self._group(begin, n, chunk_cost, chunk_size)
                begin, used = n, 0
            used += needed
        if self.sequences:
            yield self._group(begin, self.sequences, chunk_cost, chunk_size)

    def clear_tails(self, encoded: Tensor, predicted: Tensor) -> None:
        encoded[self.frames[-1] :] = 0
        predicted[self.states[-1] :] = 0

    def _frames(self, n: int) -> int:
        return self.frames[n + 1] - self.frames[n]

    def _states(self, n: int) -> int:
        return self.states[n + 1] - self.states[n]

    def _group(self, begin: int, end: int, cost: Cost, size: int) -> Group:
        spans = (
            (offsets[begin], offsets[end] - offsets[begin])
            for offsets in (self.frames, self.nodes, self.states)
        )
        (frame, frames), (node, nodes), (state, states) = spans
        chunks = tuple(self._chunks(begin, end, cost, size))
        return Group(begin, end - begin, frame, frames, node, nodes, state, states, chunks)

    def _chunks(self, begin: int, end: int, cost: Cost, size: int) -> Iterator[Chunk]:
        start, used = self.frames[begin], 0
        first = begin
        for n in range(begin, end):
            states, frame = self._states(n), self.frames[n]
            each = cost.of(1, states) - cost.state * states
            while frame < self.frames[n + 1]:
                fitting = (size - used - cost.state * states) // each
                if fitting <= 0 and frame > start:
                    yield self._chunk(first, n if frame > self.frames[n] else n - 1, start, frame)
                    start, used, first = frame, 0, n
                    continue
                if frame == start:
                    first = n
                count = min(self.frames[n + 1] - frame, max(1, fitting))
                frame += count
                used += count * each
            used += cost.state * states
        if start < self.frames[end]:
            yield self._chunk(first, end - 1, start, self.frames[end])

    def _chunk(self, first: int, last: int, start: int, stop: int) -> Chunk:
        node = self.nodes[first] + (start - self.frames[first]) * self._states(first)
        past = self.nodes[last] + (stop - self.frames[last]) * self._states(last)
        states = self.states[last + 1] - self.states[first]
        room = Room(past - node, stop - start, last - first + 1, states)
        return Chunk(
            *(start, room.frames, node, room.nodes),
            *(first, room.sequences, self.states[first], room.states),
            room,
        )


def first_nodes(layout_frames: PackedLayout, layout_targets: PackedLayout) -> Tensor:
    """The first node of each sequence and the number of nodes: int64 (N + 1,), on the device."""
    frames = layout_frames.cu_seqlens.diff().long()
    offsets = frames.new_zeros(frames.shape[0] + 1)
    torch.cumsum(frames * (layout_targets.cu_seqlens.diff() + 1), 0, out=offsets[1:])
    return offsets


def most_nodes(layout_frames: PackedLayout, layout_targets: PackedLayout) -> int | None:
    """Upper bound of the number of nodes for static shapes; None without a static bound."""
    if layout_targets.static_max_seqlen is None:
        return None
    return layout_frames.rows * (layout_targets.static_max_seqlen + 1)
