"""`subsampling_stem` as torch's dispatcher sees it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend, Op
from effasr_kernels.runtime.flops import known_lengths
from effasr_kernels.runtime.torch_op import LAYOUT, TENSOR, Registered


def _outputs(x: Tensor, weight: Tensor, layout: PackedLayout, **_: Any) -> Tensor:
    return x.new_empty(2 * layout.rows, x.shape[1] // 4, weight.shape[0])


def _flops(x: Tensor, weight: Tensor, layout: PackedLayout, **_: Any) -> int:
    slots, bins, channels = sum(known_lengths(layout)), x.shape[1], weight.shape[0]
    places = 4 * slots * (bins // 2) + 2 * slots * (bins // 4)
    return 2 * 9 * channels * places


op = Op(
    "subsampling_stem",
    {
        Backend.TRITON: "effasr_kernels.subsampling_stem._triton",
        Backend.REFERENCE: "effasr_kernels.subsampling_stem.reference",
    },
)

call = Registered(
    op,
    {
        "x": TENSOR,
        "weight": TENSOR,
        "bias": TENSOR,
        "depthwise_weight": TENSOR,
        "depthwise_bias": TENSOR,
        "layout": LAYOUT,
        "lengths": TENSOR,
    },
    outputs=_outputs,
    flops=_flops,
)
