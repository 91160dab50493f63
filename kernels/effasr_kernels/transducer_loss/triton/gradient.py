"""Kernels for the gradient of a chunk's logits, which are recomputed tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl

from effasr_kernels.transducer_loss.triton.joint import load_number


@triton.jit
def _passing(row, node, normalizer_node, is_node, log_normalizer, occ_blank, occ_label, labels):
    """Load the normalizer, the occupancies of blank and label, and the label of some rows.

    A row with zero occupancies has no gradient. Its sequence may hold NaN, so its normalizer is
    replaced by inf, which makes all exponentials zero.
    """
    normalizer = tl.load(log_normalizer + normalizer_node, mask=is_node, other=0.0)
    blank = tl.load(occ_blank + node, mask=is_node, other=0.0)
    label = tl.load(occ_label + node, mask=is_node, other=0.0)
    own = tl.load(labels + row, mask=is_node, other=-1)
    alive = (blank != 0.0) | (label != 0.0)
    return tl.where(alive, normalizer, float("inf")), blank, label, own


@triton.jit
def _difference(z, v, normalizer, blank, label, own, blank_id):
    """The gradient of logits ``z`` of some rows and classes: scaled softmax minus occupancies."""
    d = tl.exp(z - normalizer[:, None]) * (blank + label)[:, None]
    d -= tl.where(v[None, :] == blank_id, blank[:, None], 0.0)
    return d - tl.where(v[None, :] == own[:, None], label[:, None], 0.0)


@triton.jit(do_not_specialize=["first_node", "first_normalizer", "nodes", "rows", "blank_id"])
def differentiate(
    hidden,
    weight,
    bias,
    log_normalizer,
    occ_blank,
    occ_label,
    labels,
    d_logits,
    d_bias,
    first_node,
    first_normalizer,
    nodes,
    rows,
    count,
    blank_id,
    hidden_stride,
    weight_stride,
    d_stride,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile of the gradient of the logits, and its column sums.

    Tiles of the same rows are next to each other, so that ``hidden`` is read once from memory, and
    ``weight``, which is small, stays in the cache.

    Args:
        hidden: (R, WIDTH).
        weight: (V, WIDTH).
        bias: (V,).
        log_normalizer: float32: the logarithm of each row's sum of exponentials.
        occ_blank: float32, of the group's nodes: occupancy of the blank.
        occ_label: float32, of the group's nodes: occupancy of the label.
        labels: int32 (R,).
        d_logits: (R, V), written, including the padding between rows.
        d_bias: float32 (ceil(rows / BLOCK_R), V), written: sums over each tile's rows.
        first_node: The chunk's first node, relative to the group's; see `joint.load_number`.
        first_normalizer: Index of the chunk's first node in ``log_normalizer``; None if it is that
            of ``first_node``.
        nodes: Number of nodes of the chunk; see `joint.load_number`.
        rows: Rows to write, at least ``nodes``: those past the nodes are set to zero.
        count: V.
        blank_id: The blank's class.
        hidden_stride: Row stride of ``hidden`` in elements.
        weight_stride: Row stride of ``weight`` in elements.
        d_stride: Row stride of the gradient in elements.
        WIDTH: A multiple of ``BLOCK_C``.
        BLOCK_R: Rows of a tile.
        BLOCK_V: Classes of a tile.
        BLOCK_C: Columns per step.
    """
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
    normalizer, blank, label, own = _passing(  # pyright: ignore[reportGeneralTypeIssues]
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
    d = _difference(z, v, normalizer, blank, label, own, blank_id)
    out = d_logits + (first_row.to(tl.int64) + in_rows[:, None]) * d_stride + v[None, :]
    # Stored up to the next row, as a mask at V would store single elements.
    stored = (row < rows)[:, None] & (v < d_stride)[None, :]
    tl.store(out, d.to(d_logits.dtype.element_ty), mask=stored)
    sums = d_bias + row_tile.to(tl.int64) * count + v
    tl.store(sums, tl.sum(d, axis=0), mask=v < count)


@triton.jit(do_not_specialize=["first_node", "first_normalizer", "nodes", "blank_id"])
def differentiate_kept(
    logits,
    log_normalizer,
    occ_blank,
    occ_label,
    labels,
    d_bias,
    first_node,
    first_normalizer,
    nodes,
    count,
    blank_id,
    stride,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Overwrite stored logits with their gradient; see `differentiate`.

    Args:
        logits: (G, V), of the group's nodes.
        log_normalizer: See `differentiate`.
        occ_blank: See `differentiate`.
        occ_label: See `differentiate`.
        labels: See `differentiate`.
        d_bias: See `differentiate`.
        first_node: See `differentiate`.
        first_normalizer: See `differentiate`.
        nodes: See `differentiate`.
        count: V.
        blank_id: The blank's class.
        stride: Row stride of ``logits`` in elements.
        BLOCK_R: Rows per program.
        BLOCK_V: Classes per program.
        ROWS: Rows per step, a divisor of ``BLOCK_R``.
    """
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
        normalizer, blank, label, own = _passing(  # pyright: ignore[reportGeneralTypeIssues]
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
        d = _difference(z, v, normalizer, blank, label, own, blank_id)
        tl.store(tile, d.to(logits.dtype.element_ty), mask=is_node[:, None] & inside)
        sums += d
        tile += ROWS * stride
    sums = tl.sum(sums, axis=0)
    tl.store(d_bias + tl.program_id(0).to(tl.int64) * count + v, sums, mask=v < count)
