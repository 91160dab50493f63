"""`ctc_loss` as torch's dispatcher sees it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend, Op
from effasr_kernels.runtime.flops import known_lengths
from effasr_kernels.runtime.torch_op import INT, LAYOUT, OPTIONAL_TENSOR, TENSOR, Registered
from effasr_kernels.shared.ragged import wide_dtype


def _outputs(hidden: Tensor, layout_frames: PackedLayout, **_: Any) -> Tensor:
    sequences = layout_frames.cu_seqlens.shape[0] - 1
    return hidden.new_empty(sequences, dtype=wide_dtype(hidden))


def _flops(weight: Tensor, layout_frames: PackedLayout, **_: Any) -> int:
    return 2 * sum(known_lengths(layout_frames)) * weight.numel()


op = Op(
    "ctc_loss",
    {
        Backend.TRITON: "effasr_kernels.ctc_loss._triton",
        Backend.CPP: "effasr_kernels.ctc_loss._cpp",
        Backend.REFERENCE: "effasr_kernels.ctc_loss.reference",
    },
)

call = Registered(
    op,
    {
        "hidden": TENSOR,
        "weight": TENSOR,
        "targets": TENSOR,
        "layout_frames": LAYOUT,
        "layout_targets": LAYOUT,
        "bias": OPTIONAL_TENSOR,
        "blank_id": INT,
    },
    outputs=_outputs,
    flops=_flops,
)
