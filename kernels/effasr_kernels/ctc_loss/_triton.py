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

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from effasr_kernels.ctc_loss._labels import (
    label_gradient,
    merge_repeats,
    score_labels,
    softmax_gradient,
)
from effasr_kernels.ctc_loss._lattice import sweep_backward, sweep_forward
from effasr_kernels.ctc_loss.definition import CtcArguments
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.launch import launch, refusal
from effasr_kernels.runtime.tiles import count_tiles
from effasr_kernels.shared.projection import project_backward, row_statistics

_NARROWEST, _WIDEST = 64, 2048
_MERGED_FRAMES = 32


def unsupported_reason(a: CtcArguments) -> str | None:
    """Return why this backend does not support these arguments, or None if it does."""
    longest = a.layout_targets.max_seqlen_bound
    if longest >= _WIDEST:
        return f"supports up to {_WIDEST - 1} labels in a sequence, not {longest}"
    return refusal(a.hidden)


def forward(
    a: CtcArguments,
) -> tuple[tuple[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """See `effasr_kernels.ctc_loss.ctc_loss`; the second result is described in `saved_like`."""
    hidden, weight, targets, bias = _dense(a)
    offsets = a.layout_frames.cu_seqlens, a.layout_targets.cu_seqlens
    log_normalizer = row_statistics(hidden, weight, bias, total=offsets[0][-1:]).log_normalizer
    _, moved, scores, ended = saved_like(a)
    (rows, columns), sequences = scores.shape, a.layout_frames.num_sequences
    config = _product(hidden.dtype, hidden.shape[1])
    launch(
        score_labels,
        (
            count_tiles(rows, sequences, config["BLOCK_M"]),
            _pieces(columns, config["BLOCK_N"]),
        ),
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
    """Return empty tensors with the shapes and dtypes of what `forward` saves, all float32.

    They are the normalizers (T,), the shares ``moved`` and ``stayed`` of `sweep_backward`, both
    (T, K + 1), and the share of alignments that ended in the last label, (N,).
    """
    table = a.hidden.shape[0], a.layout_targets.max_seqlen_bound + 1
    shapes = a.hidden.shape[:1], table, table, (a.layout_frames.num_sequences,)
    log_normalizer, moved, stayed, ended = (
        a.hidden.new_empty(shape, dtype=torch.float32) for shape in shapes
    )
    return log_normalizer, moved, stayed, ended


def backward(
    a: CtcArguments,
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    saved: Sequence[Tensor],
) -> dict[str, Tensor | None]:
    """Return the gradients of ``hidden``, ``weight`` and ``bias``."""
    hidden, weight, targets, bias = _dense(a)
    log_normalizer = saved[0]
    occupancies, classes, scale = occupancies_of(
        grads[0], results[0], saved[1:], targets, a.layout_frames, a.layout_targets, a.blank_id
    )
    columns, count = occupancies.shape[1], weight.shape[0]
    sequence_ids = a.layout_frames.sequence_ids()

    def fill(first: int, logits: Tensor, d_logits: Tensor) -> None:
        rows, pitch = logits.shape[0], logits.stride(0)
        common = logits, d_logits, bias, log_normalizer, scale
        in_place = logits.dtype == hidden.dtype
        launch(
            softmax_gradient,
            (_pieces(rows, 4),),
            *(*common, first, rows, count, pitch),
            num_warps=8,
            num_stages=1,
            IN_PLACE=in_place,
            BLOCK_M=4,
            BLOCK_N=1024,
        )
        launch(
            label_gradient,
            (_pieces(rows, 16), _pieces(columns, 64)),
            *(*common, occupancies, classes, sequence_ids, a.layout_targets.cu_seqlens),
            *(first, rows, columns, count, pitch, a.blank_id),
            num_warps=4,
            num_stages=1,
            IN_PLACE=in_place,
            BLOCK_M=16,
            BLOCK_N=64,
        )

    # Sequences without a gradient are left out of the products, because they may contain NaN.
    gradients = project_backward(hidden, weight, bias, scale != 0, fill, padded=True)
    return dict(zip(("hidden", "weight", "bias"), gradients, strict=True))


def occupancies_of(
    grad_loss: Tensor,
    loss: Tensor,
    shares: Sequence[Tensor],
    targets: Tensor,
    layout_frames: PackedLayout,
    layout_targets: PackedLayout,
    blank_id: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return occupancies summed by class, and the classes and scales of `sweep_backward`.

    Args:
        grad_loss: float32 (N,).
        loss: float32 (N,).
        shares: The last three tensors that `forward` saves.
        targets: int32 or int64 (U,).
        layout_frames: Layout of the T frames.
        layout_targets: Layout of the U labels.
        blank_id: Class of the blank.

    Returns:
        Occupancies, float32 (T, K + 1), those of a class in its first column; classes, int32 (U,);
        scales, float32 (T,).
    """
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
        (count_tiles(rows, sequences, _MERGED_FRAMES),),
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


def _pieces(length: int, block: int) -> int:
    return -(-length // block)


def _dense(a: CtcArguments) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return hidden, weight, targets and bias, with contiguous rows."""
    hidden, weight = (x if x.stride(-1) == 1 else x.contiguous() for x in (a.hidden, a.weight))
    return hidden, weight, a.targets.contiguous(), None if a.bias is None else a.bias.contiguous()
