"""`transducer_loss` as torch's dispatcher sees it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend, Op
from effasr_kernels.runtime.flops import pairs
from effasr_kernels.runtime.torch_op import (
    FLOAT,
    INT,
    LAYOUT,
    NAMES,
    OPTIONAL_INTS,
    STRING,
    TENSOR,
    Registered,
)
from effasr_kernels.shared.ragged import wide_dtype


def _outputs(encoded: Tensor, layout_frames: PackedLayout, **_: Any) -> Tensor:
    sequences = layout_frames.cu_seqlens.shape[0] - 1
    return encoded.new_empty(sequences, dtype=wide_dtype(encoded))


def _flops(
    weight: Tensor, layout_frames: PackedLayout, layout_targets: PackedLayout, **_: Any
) -> int:
    return 2 * pairs(layout_frames, layout_targets.lengthened(1)) * weight.numel()


op = Op(
    "transducer_loss",
    {
        Backend.TRITON: "effasr_kernels.transducer_loss._triton",
        Backend.CPP: "effasr_kernels.transducer_loss._cpp",
        Backend.REFERENCE: "effasr_kernels.transducer_loss.reference",
    },
)

call = Registered(
    op,
    {
        "encoded": TENSOR,
        "predicted": TENSOR,
        "targets": TENSOR,
        "layout_frames": LAYOUT,
        "layout_targets": LAYOUT,
        "weight": TENSOR,
        "bias": TENSOR,
        "blank_id": INT,
        "activation": STRING,
        "fastemit": FLOAT,
        "durations": OPTIONAL_INTS,
        "sigma": FLOAT,
        "overwritten": NAMES,
    },
    outputs=_outputs,
    flops=_flops,
    overwritable=("encoded", "predicted"),
)
