"""`ctc_loss` in Triton, with the logits of the blank and the labels and one sweep of the lattice.

The forward computes the normalizers of all frames in one fused pass over the vocabulary, then the
logits of the blank and of the transcript's labels at each frame. One program per sequence sums
over alignments and saves the shares of predecessor states. In the backward, one program per
sequence computes occupancies from these shares; the gradient of the projection follows from
softmax minus occupancy, in chunks of frames.

With K labels in the longest transcript (`PackedLayout.max_seqlen_bound`), 8 T (K + 1) bytes are
saved for the backward, which allocates 4 T (K + 1) more and one chunk of logits of a fixed size.
For 24,000 frames and K = 200 that is 39 MB, 19 MB and the chunk of
`effasr_kernels.shared.projection`. The sweeps hold one row of the lattice in registers; its size is
the next power of two above K, from 64 to 2,048. This is the only dependence of compiled code on a
length. It is a dependence on the bound, not on the lengths, so a static shape compiles once.
"""

# pyright: reportGeneralTypeIssues=false
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.ctc_loss import CtcArguments
from effasr_kernels.ctc_loss._lattice import sweep_backward, sweep_forward
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Gradients, Tensors
from effasr_kernels.runtime.launch import ceil_div, launch
from effasr_kernels.runtime.tiles import find_tile, tile_programs
from effasr_kernels.shared.projection import project_backward, row_statistics

_NARROWEST, _WIDEST = 64, 2048
_MERGED_FRAMES = 32


def unsupported_reason(a: CtcArguments) -> str | None:
    longest = a.layout_targets.max_seqlen_bound
    if longest >= _WIDEST:
        return f"supports up to {_WIDEST - 1} labels in a sequence, not {longest}"
    return None


def forward(a: CtcArguments) -> tuple[tuple[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
    hidden, weight, targets, bias = _dense(a)
    offsets = a.layout_frames.cu_seqlens, a.layout_targets.cu_seqlens
    log_normalizer = row_statistics(hidden, weight, bias, total=offsets[0][-1:]).log_normalizer
    _, moved, scores, ended = saved_like(a)
    (rows, columns), sequences = scores.shape, a.layout_frames.num_sequences
    config = _product(hidden.dtype, hidden.shape[1])
    launch(
        score_labels,
        (tile_programs(a.layout_frames, config["BLOCK_M"]), ceil_div(columns, config["BLOCK_N"])),
        *(hidden, weight, bias, targets, *offsets, scores),
        *(sequences, rows, columns, *weight.shape),
        *(hidden.stride(0), weight.stride(0), a.blank_id),
        **config,
    )
    loss = hidden.new_empty(sequences, dtype=torch.float32)
    launch(
        sweep_forward,
        (sequences,),
        *(scores, log_normalizer, targets, *offsets, moved, ended, loss, columns),
        **_sweep(columns),
    )
    return (loss,), (log_normalizer, moved, scores, ended)


def saved_like(a: CtcArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return empty tensors with the shapes and dtypes of what `forward` saves, all float32."""
    # They are the normalizers (T,), the shares ``moved`` and ``stayed`` of `sweep_backward`, both
    # (T, K + 1), and the share of alignments that ended in the last label, (N,).
    table = a.hidden.shape[0], a.layout_targets.max_seqlen_bound + 1
    shapes = a.hidden.shape[:1], table, table, (a.layout_frames.num_sequences,)
    log_normalizer, moved, stayed, ended = (
        a.hidden.new_empty(shape, dtype=torch.float32) for shape in shapes
    )
    return log_normalizer, moved, stayed, ended


def backward(a: CtcArguments, grads: Tensors, results: Tensors, saved: Tensors) -> Gradients:
    hidden, weight, targets, bias = _dense(a)
    log_normalizer = saved[0]
    occupancies, classes, scale = occupancies_of(
        grads[0], results[0], saved[1:], targets, a.layout_frames, a.layout_targets, a.blank_id
    )
    columns, count = occupancies.shape[1], weight.shape[0]
    sequence_ids = a.layout_frames.sequence_ids()

    def write_grad_logits(first: int, logits: Tensor, d_logits: Tensor) -> None:
        rows, pitch = logits.shape[0], logits.stride(0)
        common = logits, d_logits, bias, log_normalizer, scale
        in_place = logits.dtype == hidden.dtype
        launch(
            softmax_gradient,
            (ceil_div(rows, 4),),
            *(*common, first, rows, count, pitch),
            num_warps=8,
            num_stages=1,
            IN_PLACE=in_place,
            BLOCK_M=4,
            BLOCK_N=1024,
        )
        launch(
            label_gradient,
            (ceil_div(rows, 16), ceil_div(columns, 64)),
            *(*common, occupancies, classes, sequence_ids, a.layout_targets.cu_seqlens),
            *(first, rows, columns, count, pitch, a.blank_id),
            num_warps=4,
            num_stages=1,
            IN_PLACE=in_place,
            BLOCK_M=16,
            BLOCK_N=64,
        )

    # Sequences without a gradient are left out of the products, because they may contain NaN.
    gradients = project_backward(hidden, weight, bias, scale != 0, write_grad_logits, padded=True)
    return dict(zip(("hidden", "weight", "bias"), gradients, strict=True))


def occupancies_of(
    grad_loss: Tensor,  # float32 (N,)
    loss: Tensor,  # float32 (N,)
    shares: Sequence[Tensor],  # the last three tensors that `forward` saves
    targets: Tensor,  # int32 or int64 (U,)
    layout_frames: PackedLayout,  # layout of the T frames
    layout_targets: PackedLayout,  # layout of the U labels
    blank_id: int,  # class of the blank
) -> tuple[Tensor, Tensor, Tensor]:
    """Return occupancies summed by class, and the classes and scales of `sweep_backward`."""
    moved, stayed, ended = shares
    rows, columns = moved.shape
    offsets = layout_frames.cu_seqlens, layout_targets.cu_seqlens
    sequences = layout_frames.num_sequences
    occupancies = torch.empty_like(moved)
    classes = torch.empty_like(targets, dtype=torch.int32)
    scale = moved.new_zeros(rows)
    launch(
        sweep_backward,
        (sequences,),
        *(moved, stayed, ended, loss, grad_loss, targets, *offsets),
        *(occupancies, classes, scale, columns, blank_id),
        **_sweep(columns),
    )
    launch(
        merge_repeats,
        (tile_programs(layout_frames, _MERGED_FRAMES),),
        *(occupancies, scale, targets, *offsets, sequences, rows, columns, blank_id),
        num_warps=4,
        num_stages=1,
        BLOCK_M=_MERGED_FRAMES,
        BLOCK_N=32,
    )
    return occupancies, classes, scale


def _sweep(columns: int) -> dict[str, int]:
    """Return the launch options of a sweep; two states per thread up to 16 warps."""
    block = max(_NARROWEST, 1 << (columns - 1).bit_length())
    return {"num_warps": min(16, block // 64), "num_stages": 1, "BLOCK": block, "STAGES": 4}


def _product(dtype: torch.dtype, width: int) -> dict[str, int]:
    """Return tile sizes and launch options of `score_labels` for C = ``width``."""
    if dtype == torch.float32:
        # Tensor cores would round to TF32. Without them, smaller tiles save registers.
        return {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_C": 32, "num_warps": 4, "num_stages": 2}
    # Rows that do not begin at multiples of 16 elements are loaded element-wise, via registers.
    block_c = 32 if width % 16 else 64
    return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_C": block_c, "num_warps": 4, "num_stages": 3}


def _dense(a: CtcArguments) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    hidden, weight = (x if x.stride(-1) == 1 else x.contiguous() for x in (a.hidden, a.weight))
    return hidden, weight, a.targets.contiguous(), None if a.bias is None else a.bias.contiguous()


@triton.jit
def _classes(targets, first_label, labels, column, blank_id):
    """Return the class of each column; columns past the last label get the blank, a valid class."""
    is_label = (column > 0) & (column <= labels)
    return tl.load(targets + first_label + column - 1, mask=is_label, other=blank_id).to(tl.int64)


@triton.jit(do_not_specialize=["sequences", "rows", "columns", "blank_id"])
def score_labels(
    hidden,  # (T, C)
    weight,  # (V, C)
    bias,  # (V,), or None
    targets,  # int32 or int64 (U,)
    cu_frames,  # int32 (N + 1,)
    cu_targets,  # int32 (N + 1,)
    scores,  # float32 (T, K + 1), written
    sequences,  # N
    rows,  # T
    columns,  # k + 1
    count,  # V
    width,  # C
    hidden_stride,
    weight_stride,
    blank_id,  # class of the blank
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute the logits of the blank and the labels with gathered rows of the weight."""
    # A label outside [0, V) causes no read out of bounds; its logit, and so the loss, is NaN.
    n, first_frame, frames, start = find_tile(cu_frames, sequences, rows, tl.program_id(0), BLOCK_M)
    if (n >= sequences) | (start >= frames):
        return
    first_label = tl.load(cu_targets + n)
    labels = tl.load(cu_targets + n + 1) - first_label
    first_column = tl.program_id(1) * BLOCK_N
    if first_column > labels:
        return
    column = first_column + tl.arange(0, BLOCK_N)
    label_classes = _classes(targets, first_label, labels, column, blank_id)
    exists = (label_classes >= 0) & (label_classes < count)
    label_classes = tl.where(exists, label_classes, 0)
    frame = tl.arange(0, BLOCK_M)
    channel = tl.arange(0, BLOCK_C)
    is_frame = start + frame < frames
    first_row = first_frame + start
    h_tile = hidden + first_row * hidden_stride + frame[:, None] * hidden_stride + channel[None, :]
    w_tile = weight + label_classes[None, :] * weight_stride + channel[:, None]
    z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for c in range(0, width, BLOCK_C):
        inside = c + channel < width
        h = tl.load(h_tile + c, mask=is_frame[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_tile + c, mask=inside[:, None], other=0.0)
        z = tl.dot(h, w, z, input_precision="ieee")
    if bias is not None:
        z += tl.load(bias + label_classes).to(tl.float32)[None, :]
    z = tl.where(exists[None, :], z, float("nan"))
    index = scores + first_row * columns + frame[:, None] * columns + column[None, :]
    tl.store(index, z, mask=is_frame[:, None] & (column <= labels)[None, :])


@triton.jit(do_not_specialize=["sequences", "rows", "columns", "blank_id"])
def merge_repeats(
    occupancies,  # float32 (T, K + 1), read and written
    scale,  # float32 (T,); sequences where it is 0 are skipped
    targets,  # int32 or int64 (U,)
    cu_frames,  # int32 (N + 1,)
    cu_targets,  # int32 (N + 1,)
    sequences,  # N
    rows,  # T
    columns,  # k + 1
    blank_id,  # class of the blank
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum the occupancies of all columns of a class into the first of them, in place."""
    # Columns are overwritten from left to right, and each reads only itself and columns to its
    # right, so no overwritten value is read. Columns that are not the first of a class are
    # undefined afterwards.
    n, first_frame, frames, start = find_tile(cu_frames, sequences, rows, tl.program_id(0), BLOCK_M)
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
        label_classes = _classes(targets, first_label, labels, column, blank_id)
        merged = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for d in range(c, labels + 1, BLOCK_N):
            other_column = d + tl.arange(0, BLOCK_N)
            other = _classes(targets, first_label, labels, other_column, blank_id)
            is_other = is_frame & (other_column <= labels)[None, :]
            part = tl.load(tile + other_column[None, :], mask=is_other, other=0.0)
            same = (other[:, None] == label_classes[None, :]).to(tl.float32)
            merged = tl.dot(part, same, merged, input_precision="ieee")
        # No thread may write an element before the other threads have read it for their products.
        tl.debug_barrier()
        tl.store(tile + column[None, :], merged, mask=is_frame & (column <= labels)[None, :])


@triton.jit(do_not_specialize=["first", "rows"])
def softmax_gradient(
    logits,  # float32 (n, V), frames from `first` on, without the bias
    d_logits,  # (n, V), written; may be `logits`
    bias,  # (V,), or None
    log_normalizer,  # float32 (T,)
    scale,  # float32 (T,); where it is 0 the gradient is 0 even if logits are not finite
    first,  # index of the first frame
    rows,  # n
    count,  # V
    pitch,
    IN_PLACE: tl.constexpr,  # whether `d_logits` is `logits`, float32
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the first term of the gradient of the logits, scale times softmax."""
    # For float32 gradients the normalizer is not accurate enough: it is rounded, and it was summed
    # from products computed in another order. The softmax is therefore divided by its sum, so that
    # it sums to 1 as the occupancies do. For narrower gradients the error is below their rounding.
    # The padding between rows is read and written too: masks that end at an arbitrary class would
    # make loads and stores of single elements.
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < rows
    factor = tl.load(scale + first + row, mask=is_row, other=0.0)[:, None]
    normalizer = tl.load(log_normalizer + first + row, mask=is_row, other=0.0)[:, None]
    counts = factor != 0.0
    index = row.to(tl.int64)[:, None] * pitch
    if IN_PLACE:
        # The whole row is summed before any of it is overwritten.
        mass = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for v in range(0, count, BLOCK_N):
            mass += _softmax(logits, bias, index, normalizer, is_row, v, count, pitch, BLOCK_N)
        factor /= tl.sum(mass, axis=1)[:, None]
    for v in range(0, count, BLOCK_N):
        softmax = _softmax(logits, bias, index, normalizer, is_row, v, count, pitch, BLOCK_N)
        column = v + tl.arange(0, BLOCK_N)[None, :]
        gradient = tl.where(counts, factor * softmax, 0.0)
        tl.store(d_logits + index + column, gradient, mask=is_row[:, None] & (column < pitch))


@triton.jit
def _softmax(
    logits, bias, index, normalizer, is_row, first_class, count, pitch, BLOCK_N: tl.constexpr
):
    """Return exp(logits - normalizer) of a tile; 0 outside the rows and classes."""
    v = first_class + tl.arange(0, BLOCK_N)
    is_inside = is_row[:, None] & (v < pitch)[None, :]
    z = tl.load(logits + index + v[None, :], mask=is_inside, other=float("-inf"))
    z = tl.where((v < count)[None, :], z, float("-inf"))
    if bias is not None:
        z += tl.load(bias + v, mask=v < count, other=0.0).to(tl.float32)[None, :]
    return tl.exp(z - normalizer)


@triton.jit(do_not_specialize=["first", "rows", "columns", "blank_id"])
def label_gradient(
    logits,  # float32 (n, V), as for `softmax_gradient`
    d_logits,  # (n, V), output of `softmax_gradient`; the elements of these classes are overwritten
    bias,  # (V,), or None
    log_normalizer,  # float32 (T,)
    scale,  # float32 (T,)
    occupancies,  # float32 (T, K + 1), output of `merge_repeats`
    classes,  # int32 (U,), class of each label if it is the first of its class, else -1
    sequence_ids,  # int64 (T,), sequence of each frame
    cu_targets,  # int32 (N + 1,)
    first,  # index of the first frame
    rows,  # n
    columns,  # k + 1
    count,  # V
    pitch,
    blank_id,  # class of the blank
    IN_PLACE: tl.constexpr,  # whether ``d_logits`` is ``logits``, overwritten by `softmax_gradient`
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the gradient of the logits of the blank and the labels: scale (softmax - occupancy)."""
    # It must be launched after `softmax_gradient`. Each element is written by one thread, because
    # only one column of each class is used.
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
    label_classes = tl.load(classes + first_label[:, None] + column - 1, mask=is_label, other=-1)
    label_classes = tl.where(column == 0, blank_id, label_classes)
    is_own = counts[:, None] & (label_classes >= 0) & (label_classes < count)
    index = row.to(tl.int64)[:, None] * pitch + label_classes
    source = occupancies + frame.to(tl.int64)[:, None] * columns + column
    occupancy = tl.load(source, mask=is_own, other=0.0)
    if IN_PLACE:
        softmax_part = tl.load(d_logits + index, mask=is_own, other=0.0)
        gradient = softmax_part - factor[:, None] * occupancy
    else:
        z = tl.load(logits + index, mask=is_own, other=0.0)
        if bias is not None:
            z += tl.load(bias + label_classes, mask=is_own, other=0.0).to(tl.float32)
        normalizer = tl.load(log_normalizer + frame, mask=counts, other=0.0)
        gradient = factor[:, None] * (tl.exp(z - normalizer[:, None]) - occupancy)
    tl.store(d_logits + index, gradient, mask=is_own)
