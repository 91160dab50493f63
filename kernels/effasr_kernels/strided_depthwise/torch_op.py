"""`strided_depthwise` as torch's dispatcher sees it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend, Op
from effasr_kernels.runtime.flops import known_lengths
from effasr_kernels.runtime.torch_op import LAYOUT, TENSOR, Registered


def _outputs(x: Tensor, layout: PackedLayout, **_: Any) -> Tensor:
    return x.new_empty(layout.rows, x.shape[1] // 2, x.shape[2])


def _flops(x: Tensor, weight: Tensor, layout: PackedLayout, **_: Any) -> int:
    return 2 * sum(known_lengths(layout)) * (x.shape[1] // 2) * weight.numel()


op = Op(
    "strided_depthwise",
    {
        Backend.TRITON: "effasr_kernels.strided_depthwise._triton",
        Backend.REFERENCE: "effasr_kernels.strided_depthwise.reference",
    },
)

call = Registered(
    op,
    {
        "x": TENSOR,
        "weight": TENSOR,
        "bias": TENSOR,
        "layout": LAYOUT,
        "lengths": TENSOR,
    },
    outputs=_outputs,
    flops=_flops,
)
