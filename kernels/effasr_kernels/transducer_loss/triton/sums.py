"""The gradients of `transducer_loss`, summed group by group."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.runtime.launch import capability, ceil_div, launch
from effasr_kernels.shared.projection import multiply, multiply_add
from effasr_kernels.transducer_loss.triton import fold as folding
from effasr_kernels.transducer_loss.triton.joint import load_number
from effasr_kernels.transducer_loss.triton.plan import Chunk, Group, Number, Scores
from effasr_kernels.transducer_loss.triton.work import Rows, Work


class Sums:
    def __init__(
        self, work: Work, groups: Sequence[Group], rows: Rows, overwritten: Sequence[str] = ()
    ):
        """Allocate the gradients, and buffers for the largest chunk."""
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
            # On the device all is one group; its planes begin with the same node.
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
            ceil_div(chunk.room.nodes, tiles["BLOCK_R"]),
            ceil_div(work.count, tiles["BLOCK_V"]),
        )
        d_bias = self.d_bias.new_empty(row_tiles, work.count)
        if logits is None:
            # A limit of registers, so that two programs share a multiprocessor.
            narrow = work.weight.dtype != torch.float32
            launch(
                differentiate,
                (row_tiles * class_tiles,),
                *(self.rows.hidden, work.weight, work.bias, *numbers, d_logits, d_bias),
                *(*firsts, chunk.nodes, chunk.room.nodes, work.count, work.blank_id),
                *(self.rows.hidden.stride(0), work.weight.stride(0), d_logits.stride(0)),
                WIDTH=work.weight.shape[1],
                maxnreg=128 if narrow and capability(work.weight.device) < (10, 0) else None,
                **tiles,
            )
        else:
            launch(
                differentiate_kept,
                (row_tiles, ceil_div(work.count, 64)),
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
        """Sum a chunk's rows: write the gradient of its frames, and add to its states' gradient."""
        work = self.work
        room = chunk.room
        sums = folding.count_sums(room.nodes, room.frames, room.states)
        over_states, over_frames = (d_hidden.new_empty(count, work.width) for count in sums)
        where = chunk.first_node, chunk.first_frame, chunk.frames
        columns = ceil_div(work.width, folding.COLUMNS)
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
            (ceil_div(room.frames, folding.ROWS), columns),
            *(*work.offsets, over_states, self.d_encoded, *where, *search, work.width),
            num_warps=4,
            num_stages=1,
            STATES=folding.STATES,
            BLOCK_R=folding.ROWS,
            BLOCK_C=folding.COLUMNS,
        )
        launch(
            folding.finish_states,
            (ceil_div(room.states, folding.ROWS), columns),
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
    # The lower limit is for launches that are only recorded, with undefined numbers.
    node = (row + chunk.node_from(base)).clamp_(0, plane.shape[0] - 1)
    past = (row >= chunk.nodes)[:, None]
    # Replaced, not multiplied: past the nodes there may be anything.
    return plane.index_select(0, node).masked_fill_(past, 0)


@triton.jit
def _passing(row, node, normalizer_node, is_node, log_normalizer, occ_blank, occ_label, labels):
    """Load the normalizer, the occupancies of blank and label, and the label of some rows."""
    # A row with zero occupancies has no gradient. Its sequence may hold NaN, so its normalizer is
    # replaced by inf, which makes all exponentials zero.
    normalizer = tl.load(log_normalizer + normalizer_node, mask=is_node, other=0.0)
    blank = tl.load(occ_blank + node, mask=is_node, other=0.0)
    label = tl.load(occ_label + node, mask=is_node, other=0.0)
    label_class = tl.load(labels + row, mask=is_node, other=-1)
    alive = (blank != 0.0) | (label != 0.0)
    return tl.where(alive, normalizer, float("inf")), blank, label, label_class


@triton.jit
def _difference(z, v, normalizer, blank, label, label_class, blank_id):
    """The gradient of logits ``z`` of some rows and classes: scaled softmax minus occupancies."""
    d = tl.exp(z - normalizer[:, None]) * (blank + label)[:, None]
    d -= tl.where(v[None, :] == blank_id, blank[:, None], 0.0)
    return d - tl.where(v[None, :] == label_class[:, None], label[:, None], 0.0)


@triton.jit(do_not_specialize=["first_node", "first_normalizer", "nodes", "rows", "blank_id"])
def differentiate(
    hidden,  # (R, WIDTH)
    weight,  # (V, WIDTH)
    bias,  # (V,)
    log_normalizer,  # float32: the logarithm of each row's sum of exponentials
    occ_blank,  # float32, of the group's nodes: occupancy of the blank
    occ_label,  # float32, of the group's nodes: occupancy of the label
    labels,  # int32 (R,)
    d_logits,  # (R, V), written, including the padding between rows
    d_bias,  # float32 (ceil(rows / BLOCK_R), V), written: sums over each tile's rows
    first_node,  # the chunk's first node, relative to the group's; see `joint.load_number`
    first_normalizer,  # chunk's first node in ``log_normalizer``; None: ``first_node``
    nodes,  # number of nodes of the chunk; see `joint.load_number`
    rows,  # rows to write, at least `nodes`: those past the nodes are set to zero
    count,  # V
    blank_id,  # the blank's class
    hidden_stride,
    weight_stride,
    d_stride,
    WIDTH: tl.constexpr,  # a multiple of `BLOCK_C`
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile of the gradient of the logits, and its column sums."""
    # Tiles of the same rows are next to each other, so that ``hidden`` is read once from memory,
    # and ``weight``, which is small, stays in the cache.
    tiles = tl.cdiv(count, BLOCK_V)
    row_tile = tl.program_id(0) // tiles
    first_class = (tl.program_id(0) - row_tile * tiles) * BLOCK_V
    first_row = row_tile * BLOCK_R
    in_rows = tl.arange(0, BLOCK_R)
    in_classes = tl.arange(0, BLOCK_V)
    in_width = tl.arange(0, BLOCK_C)
    # Rows and classes past the end load the last one, unmasked; they have no gradient.
    last_row = tl.maximum(load_number(nodes), 1) - 1 - first_row
    h_tile = hidden + first_row.to(tl.int64) * hidden_stride + in_width[None, :]
    h_tile += tl.minimum(in_rows, last_row)[:, None] * hidden_stride
    w_tile = weight + first_class.to(tl.int64) * weight_stride + in_width[None, :]
    w_tile += tl.minimum(in_classes, count - 1 - first_class)[:, None] * weight_stride
    v = first_class + in_classes
    start = tl.load(bias + v, mask=v < count, other=0.0).to(tl.float32)
    z = tl.zeros((BLOCK_R, BLOCK_V), tl.float32) + start[None, :]
    for c in range(0, WIDTH, BLOCK_C):
        z = tl.dot(tl.load(h_tile + c), tl.trans(tl.load(w_tile + c)), z, input_precision="ieee")

    row = first_row + in_rows
    node = load_number(first_node).to(tl.int64) + row
    normalizer_node = node
    if first_normalizer is not None:
        normalizer_node = first_normalizer.to(tl.int64) + row
    normalizer, blank, label, label_class = _passing(
        row,
        node,
        normalizer_node,
        # Loaded again, as a register for it during the product would be one too many.
        row < load_number(nodes),
        log_normalizer,
        occ_blank,
        occ_label,
        labels,
    )
    d = _difference(z, v, normalizer, blank, label, label_class, blank_id)
    out = d_logits + (first_row.to(tl.int64) + in_rows[:, None]) * d_stride + v[None, :]
    # Stored up to the next row, as a mask at V would store single elements.
    stored = (row < rows)[:, None] & (v < d_stride)[None, :]
    tl.store(out, d.to(d_logits.dtype.element_ty), mask=stored)
    sums = d_bias + row_tile.to(tl.int64) * count + v
    tl.store(sums, tl.sum(d, axis=0), mask=v < count)


@triton.jit(do_not_specialize=["first_node", "first_normalizer", "nodes", "blank_id"])
def differentiate_kept(
    logits,  # (G, V), of the group's nodes
    log_normalizer,
    occ_blank,
    occ_label,
    labels,
    d_bias,
    first_node,
    first_normalizer,
    nodes,
    count,  # V
    blank_id,  # the blank's class
    stride,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,  # rows per step, a divisor of `BLOCK_R`
):
    """Overwrite stored logits with their gradient; see `differentiate`."""
    first_row = tl.program_id(0) * BLOCK_R
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_rows = tl.arange(0, ROWS)
    tile = logits + (first_node.to(tl.int64) + first_row) * stride
    tile += in_rows[:, None] * stride + v[None, :]
    sums = tl.zeros((ROWS, BLOCK_V), tl.float32)
    for first in range(first_row, first_row + BLOCK_R, ROWS):
        row = first + in_rows
        is_node = row < nodes
        node = first_node.to(tl.int64) + row
        normalizer, blank, label, label_class = _passing(
            row,
            node,
            first_normalizer.to(tl.int64) + row,
            is_node,
            log_normalizer,
            occ_blank,
            occ_label,
            labels,
        )
        inside = (v < stride)[None, :]
        is_passed = (normalizer < float("inf"))[:, None] & inside
        z = tl.load(tile, mask=is_passed, other=0.0).to(tl.float32)
        d = _difference(z, v, normalizer, blank, label, label_class, blank_id)
        tl.store(tile, d.to(logits.dtype.element_ty), mask=is_node[:, None] & inside)
        sums += d
        tile += ROWS * stride
    sums = tl.sum(sums, axis=0)
    tl.store(d_bias + tl.program_id(0).to(tl.int64) * count + v, sums, mask=v < count)
