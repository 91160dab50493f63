"""`depthwise_conv` as torch's dispatcher sees it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend, Op
from effasr_kernels.runtime.flops import known_lengths
from effasr_kernels.runtime.torch_op import BOOL, LAYOUT, OPTIONAL_TENSOR, TENSOR, Registered
from effasr_kernels.shared.ragged import wide_dtype


def _outputs(
    x: Tensor, weight: Tensor, *, statistics: bool, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    channels = weight.shape[0]
    size, dtype = channels if statistics else 0, wide_dtype(x)
    y = x.new_empty(x.shape[0], channels)
    return y, x.new_empty(size, dtype=dtype), x.new_empty(size, dtype=dtype)


def _flops(weight: Tensor, layout: PackedLayout, **_: Any) -> int:
    return 2 * sum(known_lengths(layout)) * weight.numel()


op = Op(
    "depthwise_conv",
    {
        Backend.TRITON: "effasr_kernels.depthwise_conv._triton",
        Backend.REFERENCE: "effasr_kernels.depthwise_conv.reference",
    },
)

call = Registered(
    op,
    {
        "x": TENSOR,
        "weight": TENSOR,
        "layout": LAYOUT,
        "bias": OPTIONAL_TENSOR,
        "causal": BOOL,
        "gated": BOOL,
        "statistics": BOOL,
    },
    outputs=_outputs,
    flops=_flops,
    returns="(Tensor, Tensor, Tensor)",
)
