"""A call of `transducer_loss` as kernels take it: its rows, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from effasr_kernels.launch import capability, launch
from effasr_kernels.packed import PackedLayout
from effasr_kernels.projection import aligned, product_tiles, row_statistics
from effasr_kernels.transducer_loss import _fold
from effasr_kernels.transducer_loss._joint import join, place_nodes
from effasr_kernels.transducer_loss._plan import Chunk, Cost, Group, Lattices, first_nodes
from effasr_kernels.transducer_loss.workspace import workspace

_PLACED, _JOINED = 256, 16
_KEPT_SEQUENCES = 8
"""So many lattices, at least, must be summed at once: one alone would leave the GPU idle."""


class Rows(NamedTuple):
    """What is known of each node of a chunk.

    Attributes:
        frame: int32 (R,), its row of ``encoded``.
        state: int32 (R,), its row of ``predicted``.
        label: int32 (R,); see `place_nodes`.
        hidden: (R, ...), its row of the joint's output, with zeros past J.
    """

    frame: Tensor
    state: Tensor
    label: Tensor
    hidden: Tensor


class Work:
    """The arguments of a call as kernels take them, and what forward and backward share."""

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        layout_frames: PackedLayout,
        layout_targets: PackedLayout,
        blank_id: int,
        activation: str,
    ):
        """Prepare encoded, predicted, targets, weight and bias."""
        encoded, predicted, targets, weight, bias = tensors
        self.encoded, self.predicted = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (encoded, predicted)
        )
        self.targets, self.bias = targets.contiguous(), bias.contiguous()
        self.blank_id, self.is_tanh = blank_id, activation == "tanh"
        self.count, self.width = weight.shape
        self.tiles = product_tiles(weight.dtype, capability(weight.device))
        self.weight = aligned(weight, self.tiles["BLOCK_C"])
        self.logit_bytes = pieces(self.count, 16) * 16 * weight.element_size()
        self.lattices = Lattices(layout_frames, layout_targets)
        starts = first_nodes(layout_frames, layout_targets)
        self.offsets = layout_frames.cu_seqlens, layout_targets.cu_seqlens, starts
        self.steps = self.lattices.sequences.bit_length()

    def row_bytes(self) -> Cost:
        """Of a chunk whose rows are scored: three numbers, the row, and its statistics."""
        return Cost(node=32 + self.weight.shape[1] * self.weight.element_size())

    def gradient_cost(self, logit_bytes: int) -> Cost:
        """Of a chunk that is differentiated: besides, three gradients and their sums."""
        wide = 4 * self.width
        sums = wide // _fold.STATES + wide // _fold.FRAMES
        sums += 4 * self.count // self.tiles["BLOCK_R"]
        return Cost(self.row_bytes().node + logit_bytes + wide + sums, frame=wide, state=wide)

    def logits_fit(self) -> bool:
        """Whether the logits of several of the longest sequences fit in the workspace."""
        most = _KEPT_SEQUENCES * self.lattices.largest
        return most * self.logit_bytes <= workspace() // 4 * 3

    def groups(self, cost: Cost, chunk_cost: Cost, *, swapped: bool = False) -> list[Group]:
        """Divide the nodes; ``swapped`` gives groups the larger part of the workspace."""
        small = workspace() // 4
        large = workspace() - small
        sizes = (large, small) if swapped else (small, large)
        return list(self.lattices.groups(cost, sizes[0], chunk_cost, sizes[1]))

    def plane(self, group: Group) -> Tensor:
        """A number for each node of a group."""
        return self.weight.new_empty(group.nodes, dtype=torch.float32)

    def logits(self, nodes: int) -> Tensor:
        """Rows of logits, (nodes, V), which begin at multiples of 16 elements."""
        return self.weight.new_empty(nodes, pieces(self.count, 16) * 16)[:, : self.count]

    def rows(self, groups: Sequence[Group]) -> Rows:
        """Room for the largest chunk."""
        most = max((x.nodes for group in groups for x in group.chunks), default=0)
        frame, state, label = (self.targets.new_empty(most, dtype=torch.int32) for _ in range(3))
        return Rows(frame, state, label, self.weight.new_empty(most, self.weight.shape[1]))

    def score(
        self,
        group: Group,
        rows: Rows,
        log_blank: Tensor,
        log_label: Tensor,
        normalizer: Tensor | None,
        logits: Tensor | None = None,
    ) -> None:
        """The log-probabilities of blank and label of a group's nodes, float32.

        Args:
            group: Which.
            rows: To work in.
            log_blank: Written.
            log_label: Written.
            normalizer: float32, of the group's nodes, written; None if it is not wanted.
            logits: (R, V), of the group's nodes, written; None if they are not wanted.
        """
        for chunk in group.chunks:
            self.place(chunk, rows)
            self.join(group, chunk, rows, logits=(log_blank, log_label))
            part = part_of(group, chunk)
            log_normalizer = row_statistics(
                rows.hidden[: chunk.nodes],
                self.weight,
                self.bias,
                logits=None if logits is None else logits[part],
            ).log_normalizer
            log_blank[part] -= log_normalizer
            log_label[part] -= log_normalizer
            if normalizer is not None:
                normalizer[part] = log_normalizer

    def place(self, chunk: Chunk, rows: Rows) -> None:
        """Write the numbers of a chunk's rows."""
        launch(
            place_nodes,
            (pieces(chunk.nodes, _PLACED),),
            *(*self.offsets, self.targets, *rows[:3]),
            *(chunk.first_node, chunk.nodes, chunk.first_frame),
            *(self.lattices.sequences, self.steps),
            num_warps=4,
            num_stages=1,
            BLOCK=_PLACED,
        )

    def join(
        self,
        group: Group,
        chunk: Chunk,
        rows: Rows,
        *,
        logits: tuple[Tensor | None, Tensor | None] = (None, None),
        occupied: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        """Write a chunk's rows; see `join`.

        Args:
            group: Of the chunk.
            chunk: Which.
            rows: As `place` left them.
            logits: Of the group's nodes, written.
            occupied: What passes the blank and the label, of the group's nodes; rows where nothing
                passes are zero.
        """
        launch(
            join,
            (pieces(chunk.nodes, _JOINED),),
            *(self.encoded, self.predicted, *rows[:3], *occupied, self.weight, self.bias),
            *(*logits, rows.hidden, chunk.first_node - group.first_node, chunk.nodes),
            *(self.width, self.count, self.blank_id, self.encoded.stride(0)),
            *(self.predicted.stride(0), self.weight.stride(0), rows.hidden.stride(0)),
            num_warps=4,
            num_stages=1,
            TANH=self.is_tanh,
            BLOCK_R=_JOINED,
            BLOCK_C=self.tiles["BLOCK_C"],
        )


def part_of(group: Group, chunk: Chunk) -> slice:
    """The chunk's nodes among those of the group."""
    first = chunk.first_node - group.first_node
    return slice(first, first + chunk.nodes)


def pieces(number: int, divisor: int) -> int:
    """How many pieces of ``divisor`` hold ``number``."""
    return -(-number // divisor)
