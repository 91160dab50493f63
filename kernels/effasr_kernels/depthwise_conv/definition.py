"""Definition of `depthwise_conv`: arguments, backends, output shapes, FLOPs and examples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.flops import known_lengths
from effasr_kernels.runtime.torch_op import DifferentiableOp
from effasr_kernels.shared.ragged import wide_dtype

_TAPS = 9
"""Number of taps in the example."""


@dataclass(frozen=True, slots=True)
class ConvArguments:
    """Validated arguments of a call; see `effasr_kernels.depthwise_conv.depthwise_conv`."""

    x: Tensor
    weight: Tensor
    layout: PackedLayout
    bias: Tensor | None
    causal: bool
    gated: bool
    statistics: bool


def _outputs(a: ConvArguments) -> tuple[Tensor, Tensor, Tensor]:
    channels = a.weight.shape[0]
    size, dtype = channels if a.statistics else 0, wide_dtype(a.x)
    y = a.x.new_empty(a.x.shape[0], channels)
    return y, a.x.new_empty(size, dtype=dtype), a.x.new_empty(size, dtype=dtype)


def _example(inputs: ExampleInputs) -> Keywords:
    layout = inputs.frames()
    return {
        "x": inputs.floating(layout.rows, CHANNELS),
        "weight": inputs.floating(CHANNELS, _TAPS),
        "layout": layout,
        "bias": inputs.floating(CHANNELS),
    }


OPERATION = DifferentiableOp(
    "depthwise_conv",
    ConvArguments,
    {
        Backend.TRITON: "effasr_kernels.depthwise_conv._triton",
        Backend.REFERENCE: "effasr_kernels.depthwise_conv.reference",
    },
    outputs=_outputs,
    flops=lambda a: 2 * sum(known_lengths(a.layout)) * a.weight.numel(),
    results=3,
    undifferentiated=(1, 2),
    examples=[Example("depthwise_conv", _example, 2 * 40 * CHANNELS * _TAPS)],
)
