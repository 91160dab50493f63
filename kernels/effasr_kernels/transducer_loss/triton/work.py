"""The kernel arguments of a call of `transducer_loss`: rows of the joint, and log-probabilities."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from effasr_kernels.runtime.launch import capability, ceil_div, launch
from effasr_kernels.shared.projection import aligned, product_tiles, row_statistics
from effasr_kernels.transducer_loss import TransducerArguments, workspace
from effasr_kernels.transducer_loss.triton import fold as folding
from effasr_kernels.transducer_loss.triton.division import DeviceLattices
from effasr_kernels.transducer_loss.triton.joint import (
    join,
    normalize,
    place_nodes,
    score_durations,
)
from effasr_kernels.transducer_loss.triton.plan import (
    Chunk,
    Cost,
    Group,
    Lattices,
    Scores,
    first_nodes,
)

_PLACED, _JOINED = 256, 16
_KEPT_SEQUENCES = 8
"""Minimum number of lattices per launch if logits are kept; fewer would not fill the GPU."""


class Rows(NamedTuple):
    """Buffers with the rows and the label of each node of a chunk."""

    frame: Tensor  # int32 (R,), its row of `encoded`
    state: Tensor  # int32 (R,), its row of `predicted`
    label: Tensor  # int32 (R,); see `place_nodes`
    hidden: Tensor  # (R, ...), its row of the joint's output, with zeros past J


class Work:
    """The kernel arguments of a call, and the steps that forward and backward share."""

    def __init__(self, a: TransducerArguments):
        """Prepare the tensors and, without a capacity for nodes, read the lengths."""
        self.encoded, self.predicted = (
            x.detach() if x.stride(-1) == 1 else x.contiguous() for x in (a.encoded, a.predicted)
        )
        self.targets, self.bias = a.targets.contiguous(), a.bias.contiguous()
        self.blank_id, self.is_tanh = a.blank_id, a.activation == "tanh"
        self.durations: tuple[int, ...] = a.durations or ()
        self.sigma = a.sigma
        self.columns, self.width = a.weight.shape
        self.count = self.columns - len(self.durations)
        self.tiles = product_tiles(a.weight.dtype, capability(a.weight.device))
        self.weight = aligned(a.weight, self.tiles["BLOCK_C"])
        self.logit_bytes = ceil_div(self.columns, 16) * 16 * a.weight.element_size()
        frames, labels = a.layout_frames, a.layout_targets
        self.bound = labels.max_seqlen_bound
        self.offsets = frames.cu_seqlens, labels.cu_seqlens, first_nodes(frames, labels)
        self.lattices: Lattices | DeviceLattices
        if a.max_nodes is None:
            self.lattices = Lattices(frames, labels)
        else:
            self.lattices = DeviceLattices(frames, labels, self.offsets, a.max_nodes)
        self.steps = self.lattices.sequences.bit_length()

    def row_bytes(self) -> Cost:
        """Memory of a chunk in `score`: three numbers, the row, and its statistics."""
        return Cost(node=32 + self.weight.shape[1] * self.weight.element_size())

    def score_bytes(self, trace: torch.dtype | None) -> int:
        """Bytes of the log-probabilities and the trace of a node."""
        return 8 + 4 * len(self.durations) + (0 if trace is None else trace.itemsize)

    def gradient_cost(self, logit_bytes: int) -> Cost:
        """Memory of a chunk in the backward: `row_bytes`, three gradients, and sums."""
        wide = 4 * self.width
        sums = wide // folding.STATES + wide // folding.FRAMES
        sums += 4 * self.columns // self.tiles["BLOCK_R"]
        return Cost(self.row_bytes().node + logit_bytes + wide + sums, frame=wide, state=wide)

    def logits_fit(self) -> bool:
        """Whether the logits of several of the longest sequences fit in the workspace."""
        if isinstance(self.lattices, DeviceLattices):
            return False
        nodes = _KEPT_SEQUENCES * self.lattices.largest
        return nodes * self.logit_bytes <= workspace() // 4 * 3

    def groups(self, cost: Cost, chunk_cost: Cost, *, swapped: bool = False) -> list[Group]:
        """Divide the nodes; ``swapped`` gives groups the larger part of the workspace."""
        small = workspace() // 4
        large = workspace() - small
        sizes = (large, small) if swapped else (small, large)
        return list(self.lattices.groups(cost, sizes[0], chunk_cost, sizes[1]))

    def plane(self, group: Group) -> Tensor:
        """A buffer with a float32 number for each node of a group."""
        return self.weight.new_empty(group.nodes, dtype=torch.float32)

    def scores(self, group: Group) -> Scores:
        """Buffers with a float32 number for each step out of each node of a group."""
        durations = None
        if self.durations:
            size = group.nodes, len(self.durations)
            durations = self.weight.new_empty(size, dtype=torch.float32)
        return Scores(group.first_node, self.plane(group), self.plane(group), durations)

    def logits(self, nodes: int) -> Tensor:
        """A buffer of logits, (nodes, V + D), with a row stride that is a multiple of 16."""
        return self.weight.new_empty(nodes, ceil_div(self.columns, 16) * 16)[:, : self.columns]

    def rows(self, groups: Sequence[Group]) -> Rows:
        max_nodes = max((x.room.nodes for group in groups for x in group.chunks), default=0)
        frame, state, label = (
            self.targets.new_empty(max_nodes, dtype=torch.int32) for _ in range(3)
        )
        return Rows(frame, state, label, self.weight.new_empty(max_nodes, self.weight.shape[1]))

    def score(
        self,
        group: Group,
        rows: Rows,
        scores: Scores,  # log-probabilities, written
        normalizer: Tensor | None,  # float32, of the group's nodes, written; None to discard it
        logits: Tensor | None = None,  # (R, V + D), of the group's nodes, written; None: discarded
    ) -> None:
        """Compute the log-probabilities of all steps out of a group's nodes."""
        classes = self.weight[: self.count], self.bias[: self.count]
        for chunk in group.chunks:
            self.place(chunk, rows)
            self.join(chunk, rows, scores, logits=True)
            hidden, part = rows.hidden[: chunk.room.nodes], None
            if logits is not None:
                part = logits[chunk.part(group.first_node), : self.count]
            nodes = chunk.nodes
            log_normalizer = row_statistics(
                *(hidden, *classes),
                total=nodes.view(1) if isinstance(nodes, Tensor) else None,
                logits=part,
            ).log_normalizer
            output = log_normalizer, 0
            if normalizer is not None:
                output = normalizer, chunk.node_from(group.first_node)
            launch(
                normalize,
                (ceil_div(chunk.room.nodes, _PLACED),),
                *(log_normalizer, scores.blank, scores.label, output[0]),
                *(chunk.node_from(scores.base), output[1], nodes, float(self.sigma)),
                num_warps=4,
                num_stages=1,
                BLOCK=_PLACED,
            )
            if scores.duration is not None:
                score_durations(
                    *(hidden, self.weight, self.bias, scores.duration),
                    *(scores.base, chunk, self.count, self.tiles["BLOCK_C"]),
                )

    def place(self, chunk: Chunk, rows: Rows) -> None:
        """Write the frame, state and label of a chunk's nodes."""
        launch(
            place_nodes,
            (ceil_div(chunk.room.nodes, _PLACED),),
            *(*self.offsets, self.targets, *rows[:3]),
            *(chunk.first_node, chunk.nodes, chunk.first_frame),
            *(self.lattices.sequences, self.steps),
            num_warps=4,
            num_stages=1,
            BLOCK=_PLACED,
        )

    def join(self, chunk: Chunk, rows: Rows, scores: Scores, *, logits: bool = False) -> None:
        steps = scores.blank, scores.label
        none = None, None
        occupancies, outputs = (none, steps) if logits else (steps, none)
        launch(
            join,
            (ceil_div(chunk.room.nodes, _JOINED),),
            *(self.encoded, self.predicted, *rows[:3], *occupancies, self.weight, self.bias),
            *(*outputs, rows.hidden, chunk.node_from(scores.base), chunk.nodes),
            *(chunk.room.nodes, self.width, self.count, self.blank_id, self.encoded.stride(0)),
            *(self.predicted.stride(0), self.weight.stride(0), rows.hidden.stride(0)),
            num_warps=4,
            num_stages=1,
            TANH=self.is_tanh,
            BLOCK_R=_JOINED,
            BLOCK_C=self.tiles["BLOCK_C"],
        )
