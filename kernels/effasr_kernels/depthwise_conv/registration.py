"""`depthwise_conv` as torch's dispatcher sees it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from effasr_kernels.dispatch import Backend, Op
from effasr_kernels.flops import known_lengths
from effasr_kernels.library import BOOL, LAYOUT, OPTIONAL_TENSOR, TENSOR, Registered
from effasr_kernels.packed import PackedLayout


def _outputs(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _flops(weight: Tensor, layout: PackedLayout, **_: Any) -> int:
    return 2 * sum(known_lengths(layout)) * weight.numel()


op = Op("depthwise_conv", {Backend.REFERENCE: "effasr_kernels.depthwise_conv.reference"})

call = Registered(
    op,
    {
        "x": TENSOR,
        "weight": TENSOR,
        "layout": LAYOUT,
        "bias": OPTIONAL_TENSOR,
        "causal": BOOL,
    },
    outputs=_outputs,
    flops=_flops,
)
