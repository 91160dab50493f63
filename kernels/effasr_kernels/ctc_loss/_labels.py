"""Logits of the classes of each transcript, and the gradient of all logits.

For each frame the lattice needs the logits of the blank and of the transcript's labels. They are
columns 0 and 1 to U_n of float32 tables (T, K + 1), where K is at least the longest transcript.
Columns to the right of U_n are undefined.
"""

from __future__ import annotations

import triton
import triton.language as tl

from effasr_kernels.runtime.tiles import find_tile


@triton.jit
def _classes(targets, first_label, labels, column, blank_id):
    """Return the class of each column; columns past the last label get the blank, a valid class."""
    is_label = (column > 0) & (column <= labels)
    return tl.load(targets + first_label + column - 1, mask=is_label, other=blank_id).to(tl.int64)


@triton.jit(do_not_specialize=["sequences", "rows", "columns", "blank_id"])
def score_labels(
    hidden,
    weight,
    bias,
    targets,
    cu_frames,
    cu_targets,
    scores,
    sequences,
    rows,
    columns,
    count,
    width,
    hidden_stride,
    weight_stride,
    blank_id,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute the logits of the blank and the labels with gathered rows of the weight.

    A label outside [0, V) causes no read out of bounds; its logit, and so the loss, is NaN.

    Args:
        hidden: (T, C).
        weight: (V, C).
        bias: (V,), or None.
        targets: int32 or int64 (U,).
        cu_frames: int32 (N + 1,).
        cu_targets: int32 (N + 1,).
        scores: float32 (T, K + 1), written.
        sequences: N.
        rows: T.
        columns: K + 1.
        count: V.
        width: C.
        hidden_stride: Row stride of ``hidden`` in elements.
        weight_stride: Row stride of ``weight`` in elements.
        blank_id: Class of the blank.
        BLOCK_M: Frames of a tile.
        BLOCK_N: Columns of a tile.
        BLOCK_C: Channels of each partial product.
    """
    n, first_frame, frames, start = find_tile(  # pyright: ignore[reportGeneralTypeIssues]
        cu_frames, sequences, rows, tl.program_id(0), BLOCK_M
    )
    if (n >= sequences) | (start >= frames):
        return
    first_label = tl.load(cu_targets + n)
    labels = tl.load(cu_targets + n + 1) - first_label
    first_column = tl.program_id(1) * BLOCK_N
    if first_column > labels:
        return
    column = first_column + tl.arange(0, BLOCK_N)
    own = _classes(targets, first_label, labels, column, blank_id)
    exists = (own >= 0) & (own < count)
    own = tl.where(exists, own, 0)
    frame = tl.arange(0, BLOCK_M)
    channel = tl.arange(0, BLOCK_C)
    is_frame = start + frame < frames
    first_row = first_frame + start
    h_tile = hidden + first_row * hidden_stride + frame[:, None] * hidden_stride + channel[None, :]
    w_tile = weight + own[None, :] * weight_stride + channel[:, None]
    z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for c in range(0, width, BLOCK_C):
        inside = c + channel < width
        h = tl.load(h_tile + c, mask=is_frame[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_tile + c, mask=inside[:, None], other=0.0)
        z = tl.dot(h, w, z, input_precision="ieee")
    if bias is not None:
        z += tl.load(bias + own).to(tl.float32)[None, :]
    z = tl.where(exists[None, :], z, float("nan"))
    place = scores + first_row * columns + frame[:, None] * columns + column[None, :]
    tl.store(place, z, mask=is_frame[:, None] & (column <= labels)[None, :])


@triton.jit(do_not_specialize=["sequences", "rows", "columns", "blank_id"])
def merge_repeats(
    occupancies,
    scale,
    targets,
    cu_frames,
    cu_targets,
    sequences,
    rows,
    columns,
    blank_id,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum the occupancies of all columns of a class into the first of them, in place.

    Columns are overwritten from left to right, and each reads only itself and columns to its
    right, so no overwritten value is read. Columns that are not the first of a class are undefined
    afterwards.

    Args:
        occupancies: float32 (T, K + 1), read and written.
        scale: float32 (T,); sequences where it is 0 are skipped.
        targets: int32 or int64 (U,).
        cu_frames: int32 (N + 1,).
        cu_targets: int32 (N + 1,).
        sequences: N.
        rows: T.
        columns: K + 1.
        blank_id: Class of the blank.
        BLOCK_M: Frames of a tile.
        BLOCK_N: Columns of a tile.
    """
    n, first_frame, frames, start = find_tile(  # pyright: ignore[reportGeneralTypeIssues]
        cu_frames, sequences, rows, tl.program_id(0), BLOCK_M
    )
    if (n >= sequences) | (start >= frames):
        return
    if tl.load(scale + first_frame) == 0.0:
        return
    first_label = tl.load(cu_targets + n)
    labels = tl.load(cu_targets + n + 1) - first_label
    frame = tl.arange(0, BLOCK_M)
    is_frame = (start + frame < frames)[:, None]
    tile = occupancies + (first_frame + start) * columns + frame[:, None] * columns
    for c in range(0, labels + 1, BLOCK_N):
        column = c + tl.arange(0, BLOCK_N)
        own = _classes(targets, first_label, labels, column, blank_id)
        merged = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for d in range(c, labels + 1, BLOCK_N):
            other_column = d + tl.arange(0, BLOCK_N)
            other = _classes(targets, first_label, labels, other_column, blank_id)
            is_other = is_frame & (other_column <= labels)[None, :]
            part = tl.load(tile + other_column[None, :], mask=is_other, other=0.0)
            same = (other[:, None] == own[None, :]).to(tl.float32)
            merged = tl.dot(part, same, merged, input_precision="ieee")
        # No thread may write an element before the other threads have read it for their products.
        tl.debug_barrier()
        tl.store(tile + column[None, :], merged, mask=is_frame & (column <= labels)[None, :])


@triton.jit(do_not_specialize=["first", "rows"])
def softmax_gradient(
    logits,
    d_logits,
    bias,
    log_normalizer,
    scale,
    first,
    rows,
    count,
    pitch,
    IN_PLACE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the first term of the gradient of the logits, scale times softmax.

    For float32 gradients the normalizer is not accurate enough: it is rounded, and it was summed
    from products computed in another order. The softmax is therefore divided by its sum, so that
    it sums to 1 as the occupancies do. For narrower gradients the error is below their rounding.

    The padding between rows is read and written too: masks that end at an arbitrary class would
    make loads and stores of single elements.

    Args:
        logits: float32 (n, V), frames from ``first`` on, without the bias.
        d_logits: (n, V), written; may be ``logits``.
        bias: (V,), or None.
        log_normalizer: float32 (T,).
        scale: float32 (T,); where it is 0 the gradient is 0 even if logits are not finite.
        first: Index of the first frame.
        rows: n.
        count: V.
        pitch: Row stride of ``logits`` and ``d_logits`` in elements.
        IN_PLACE: Whether ``d_logits`` is ``logits``, float32.
        BLOCK_M: Frames of a tile.
        BLOCK_N: Classes of a tile.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < rows
    factor = tl.load(scale + first + row, mask=is_row, other=0.0)[:, None]
    normalizer = tl.load(log_normalizer + first + row, mask=is_row, other=0.0)[:, None]
    counts = factor != 0.0
    place = row.to(tl.int64)[:, None] * pitch
    if IN_PLACE:
        # The whole row is summed before any of it is overwritten.
        mass = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for v in range(0, count, BLOCK_N):
            mass += _softmax(logits, bias, place, normalizer, is_row, v, count, pitch, BLOCK_N)
        factor /= tl.sum(mass, axis=1)[:, None]
    for v in range(0, count, BLOCK_N):
        softmax = _softmax(logits, bias, place, normalizer, is_row, v, count, pitch, BLOCK_N)
        column = v + tl.arange(0, BLOCK_N)[None, :]
        gradient = tl.where(counts, factor * softmax, 0.0)
        tl.store(d_logits + place + column, gradient, mask=is_row[:, None] & (column < pitch))


@triton.jit
def _softmax(
    logits, bias, place, normalizer, is_row, first_class, count, pitch, BLOCK_N: tl.constexpr
):
    """Return exp(logits - normalizer) of a tile; 0 outside the rows and classes."""
    v = first_class + tl.arange(0, BLOCK_N)
    is_inside = is_row[:, None] & (v < pitch)[None, :]
    z = tl.load(logits + place + v[None, :], mask=is_inside, other=float("-inf"))
    z = tl.where((v < count)[None, :], z, float("-inf"))
    if bias is not None:
        z += tl.load(bias + v, mask=v < count, other=0.0).to(tl.float32)[None, :]
    return tl.exp(z - normalizer)


@triton.jit(do_not_specialize=["first", "rows", "columns", "blank_id"])
def label_gradient(
    logits,
    d_logits,
    bias,
    log_normalizer,
    scale,
    occupancies,
    classes,
    sequence_ids,
    cu_targets,
    first,
    rows,
    columns,
    count,
    pitch,
    blank_id,
    IN_PLACE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the gradient of the logits of the blank and the labels: scale (softmax - occupancy).

    It must be launched after `softmax_gradient`. Each element is written by one thread, because
    only one column of each class is used.

    Args:
        logits: float32 (n, V), as for `softmax_gradient`.
        d_logits: (n, V), output of `softmax_gradient`; the elements of these classes are
            overwritten.
        bias: (V,), or None.
        log_normalizer: float32 (T,).
        scale: float32 (T,).
        occupancies: float32 (T, K + 1), output of `merge_repeats`.
        classes: int32 (U,), class of each label if it is the first of its class, else -1.
        sequence_ids: int64 (T,), sequence of each frame.
        cu_targets: int32 (N + 1,).
        first: Index of the first frame.
        rows: n.
        columns: K + 1.
        count: V.
        pitch: Row stride of ``logits`` and ``d_logits`` in elements.
        blank_id: Class of the blank.
        IN_PLACE: Whether ``d_logits`` is ``logits``, which `softmax_gradient` has overwritten.
        BLOCK_M: Frames of a tile.
        BLOCK_N: Columns of a tile.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    frame = first + row
    factor = tl.load(scale + frame, mask=row < rows, other=0.0)
    counts = factor != 0.0
    n = tl.load(sequence_ids + frame, mask=counts, other=0)
    first_label = tl.load(cu_targets + n, mask=counts, other=0)
    labels = tl.load(cu_targets + n + 1, mask=counts, other=0) - first_label
    # Most transcripts are shorter than the longest. In place, this test would spill registers.
    if not IN_PLACE:  # noqa: SIM102 -- a constant
        if tl.max(labels, axis=0) < tl.program_id(1) * BLOCK_N:
            return
    is_label = counts[:, None] & (column > 0) & (column <= labels[:, None])
    own = tl.load(classes + first_label[:, None] + column - 1, mask=is_label, other=-1)
    own = tl.where(column == 0, blank_id, own)
    is_own = counts[:, None] & (own >= 0) & (own < count)
    place = row.to(tl.int64)[:, None] * pitch + own
    source = occupancies + frame.to(tl.int64)[:, None] * columns + column
    occupancy = tl.load(source, mask=is_own, other=0.0)
    if IN_PLACE:
        softmax_part = tl.load(d_logits + place, mask=is_own, other=0.0)
        gradient = softmax_part - factor[:, None] * occupancy
    else:
        z = tl.load(logits + place, mask=is_own, other=0.0)
        if bias is not None:
            z += tl.load(bias + own, mask=is_own, other=0.0).to(tl.float32)
        normalizer = tl.load(log_normalizer + frame, mask=counts, other=0.0)
        gradient = factor[:, None] * (tl.exp(z - normalizer[:, None]) - occupancy)
    tl.store(d_logits + place, gradient, mask=is_own)
