"""The gradients of `transducer_loss`, summed group by group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from effasr_kernels.runtime.launch import capability, launch
from effasr_kernels.shared.projection import multiply, multiply_add
from effasr_kernels.transducer_loss.triton import fold as folding
from effasr_kernels.transducer_loss.triton.gradient import differentiate, differentiate_kept
from effasr_kernels.transducer_loss.triton.plan import Chunk, Group, Number, Scores
from effasr_kernels.transducer_loss.triton.work import Rows, Work, pieces


class Sums:
    """Accumulates the gradients of groups."""

    def __init__(
        self, work: Work, groups: Sequence[Group], rows: Rows, overwritten: Sequence[str] = ()
    ):
        """Allocate the gradients, and buffers for the largest chunk.

        Args:
            work: The call.
            groups: The groups of the call, which are added in order.
            rows: Buffers for the largest chunk.
            overwritten: Names among ``encoded`` and ``predicted`` that are overwritten by their
                gradients. The chunk that writes the gradient of a frame is the last to read it;
                rows of ``predicted`` are read by all chunks of their group, and written after it.
        """
        self.work, self.rows = work, rows
        weight, width = work.weight, work.width
        self.d_encoded, self.d_predicted = (
            x if name in overwritten else x.new_zeros(x.shape)
            for name, x in (("encoded", work.encoded), ("predicted", work.predicted))
        )
        work.lattices.clear_tails(self.d_encoded, self.d_predicted)
        self.d_weight = weight.new_zeros(work.columns, width, dtype=torch.float32)
        self.d_bias = weight.new_zeros(work.columns, dtype=torch.float32)
        self.d_hidden = weight.new_empty(rows.hidden.shape[0], width, dtype=torch.float32)
        self.d_logits: Tensor | None = None

    def add(
        self, group: Group, passing: Scores, normalizer: Tensor, base: int, logits: Tensor | None
    ) -> None:
        """Add the gradients of a group.

        Args:
            group: The group.
            passing: Occupancies of the steps of its lattices.
            normalizer: float32, of nodes from ``base`` on.
            base: Node of the first element of ``normalizer``.
            logits: (R, V + D), of its nodes, overwritten by their gradient; None to recompute them.
        """
        work, rows = self.work, self.rows
        d_states = self.d_bias.new_zeros(group.states, work.width)
        for chunk in group.chunks:
            count = chunk.room.nodes
            hidden, d_hidden = rows.hidden[:count], self.d_hidden[:count]
            work.place(chunk, rows)
            work.join(chunk, rows, passing)
            if logits is None:
                if self.d_logits is None:
                    self.d_logits = work.logits(rows.hidden.shape[0])
                d_logits = self.d_logits[:count]
            else:
                d_logits = logits[chunk.part(group.first_node)]
            numbers = normalizer, passing.blank, passing.label, rows.label
            first = chunk.node_from(passing.base)
            # On the device all is one group, whose planes begin with the same node.
            firsts = first, None if isinstance(first, Tensor) else chunk.node_from(base)
            self._differentiate(chunk, numbers, firsts, logits, d_logits)
            if passing.duration is not None:
                d_durations = rows_of(passing.duration, chunk, passing.base)
                d_logits[:, work.count :] = d_durations
                self.d_bias[work.count :] += d_durations.sum(0)
            multiply_add(d_logits.t(), hidden[:, : work.width], self.d_weight)
            multiply(d_logits, work.weight[:, : work.width], d_hidden)
            self._fold(group, chunk, hidden, d_hidden, d_states)
        states = slice(group.first_state, group.first_state + group.states)
        self.d_predicted[states] = d_states

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradients by name, in the dtype of the arguments."""
        dtype = self.work.weight.dtype
        return {
            "encoded": self.d_encoded,
            "predicted": self.d_predicted,
            "weight": self.d_weight.to(dtype),
            "bias": self.d_bias.to(dtype),
        }

    def _differentiate(
        self,
        chunk: Chunk,
        numbers: tuple[Tensor, ...],
        firsts: tuple[Number, Number | None],
        logits: Tensor | None,
        d_logits: Tensor,
    ) -> None:
        """Write the gradient of the class logits, and add its sum to the gradient of the bias."""
        work = self.work
        tiles = work.tiles
        row_tiles, class_tiles = (
            pieces(chunk.room.nodes, tiles["BLOCK_R"]),
            pieces(work.count, tiles["BLOCK_V"]),
        )
        d_bias = self.d_bias.new_empty(row_tiles, work.count)
        if logits is None:
            launch(
                differentiate,
                (row_tiles * class_tiles,),
                *(self.rows.hidden, work.weight, work.bias, *numbers, d_logits, d_bias),
                *(*firsts, chunk.nodes, chunk.room.nodes, work.count, work.blank_id),
                *(self.rows.hidden.stride(0), work.weight.stride(0), d_logits.stride(0)),
                WIDTH=work.weight.shape[1],
                maxnreg=_most_registers(work.weight),
                **tiles,
            )
        else:
            launch(
                differentiate_kept,
                (row_tiles, pieces(work.count, 64)),
                *(logits, *numbers, d_bias, *firsts, chunk.nodes),
                *(work.count, work.blank_id, logits.stride(0)),
                num_warps=4,
                num_stages=1,
                BLOCK_R=tiles["BLOCK_R"],
                BLOCK_V=64,
                ROWS=16,
            )
        self.d_bias[: work.count] += d_bias.sum(0)

    def _fold(
        self, group: Group, chunk: Chunk, hidden: Tensor, d_hidden: Tensor, d_states: Tensor
    ) -> None:
        """Sum a chunk's rows: write the gradient of its frames, and add to that of its states."""
        work = self.work
        room = chunk.room
        sums = folding.count_sums(room.nodes, room.frames, room.states)
        over_states, over_frames = (d_hidden.new_empty(count, work.width) for count in sums)
        where = chunk.first_node, chunk.first_frame, chunk.frames
        columns = pieces(work.width, folding.COLUMNS)
        launch(
            folding.fold,
            (folding.count_tiles(room), columns),
            *(hidden, d_hidden, *work.offsets, over_states, over_frames),
            *(*where, chunk.first_sequence, chunk.sequences, work.width),
            *(hidden.stride(0), d_hidden.stride(0)),
            num_warps=1,
            num_stages=2,
            TANH=work.is_tanh,
            FRAMES=folding.FRAMES,
            STATES=folding.STATES,
            BLOCK_C=folding.COLUMNS,
        )
        search = work.lattices.sequences, work.steps
        launch(
            folding.finish_frames,
            (pieces(room.frames, folding.ROWS), columns),
            *(*work.offsets, over_states, self.d_encoded, *where, *search, work.width),
            num_warps=4,
            num_stages=1,
            STATES=folding.STATES,
            BLOCK_R=folding.ROWS,
            BLOCK_C=folding.COLUMNS,
        )
        launch(
            folding.finish_states,
            (pieces(room.states, folding.ROWS), columns),
            *(*work.offsets, over_frames, d_states, *where, chunk.first_sequence),
            *(chunk.first_state, chunk.states, group.first_state, *search, work.width),
            num_warps=4,
            num_stages=1,
            FRAMES=folding.FRAMES,
            BLOCK_R=folding.ROWS,
            BLOCK_C=folding.COLUMNS,
        )


def rows_of(plane: Tensor, chunk: Chunk, base: int) -> Tensor:
    """A chunk's rows of a tensor that begins with node ``base``; zero past its nodes."""
    if not isinstance(chunk.first_node, Tensor):
        return plane[chunk.part(base)]
    row = torch.arange(chunk.room.nodes, device=plane.device)
    # The lower limit is for launches that are only recorded, whose numbers are undefined.
    node = (row + chunk.node_from(base)).clamp_(0, plane.shape[0] - 1)
    past = (row >= chunk.nodes)[:, None]
    # Replaced, not multiplied: past the nodes there may be anything.
    return plane.index_select(0, node).masked_fill_(past, 0)


def _most_registers(weight: Tensor) -> int | None:
    """Register limit of a thread of `differentiate`, so that two programs share a multiprocessor.

    Without the limit it uses a few more, and only one program fits. With the tensor cores of
    sm_100, or without tensor cores, the limit would cause spills.
    """
    narrow = weight.dtype != torch.float32
    return 128 if narrow and capability(weight.device) < (10, 0) else None
