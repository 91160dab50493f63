"""Definition of `subsampling_stem`: arguments, backends, output shapes, FLOPs and examples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import BANDS, CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.flops import known_lengths
from effasr_kernels.runtime.torch_op import DifferentiableOp


@dataclass(frozen=True, slots=True)
class StemArguments:
    """Validated arguments of a call; see `effasr_kernels.subsampling_stem.subsampling_stem`."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    depthwise_weight: Tensor
    depthwise_bias: Tensor
    layout: PackedLayout
    lengths: Tensor
    rows_per_slot: int = 8


def _outputs(a: StemArguments) -> Tensor:
    return a.x.new_empty(a.x.shape[0] // 4, a.x.shape[1] // 4, a.weight.shape[0])


def _flops(a: StemArguments) -> int:
    rows, bins = a.rows_per_slot * sum(known_lengths(a.layout)), a.x.shape[1]
    channels = a.weight.shape[0]
    places = rows // 2 * (bins // 2) + rows // 4 * (bins // 4)
    return 2 * 9 * channels * places


def _example(inputs: ExampleInputs) -> Keywords:
    layout = inputs.frames()
    return {
        "x": inputs.floating(8 * layout.rows, BANDS, differentiable=False),
        "weight": inputs.floating(CHANNELS, 9),
        "bias": inputs.floating(CHANNELS),
        "depthwise_weight": inputs.floating(CHANNELS, 9),
        "depthwise_bias": inputs.floating(CHANNELS),
        "layout": layout,
        "lengths": inputs.integers(192, 0, 125),
    }


OPERATION = DifferentiableOp(
    "subsampling_stem",
    StemArguments,
    {
        Backend.TRITON: "effasr_kernels.subsampling_stem._triton",
        Backend.REFERENCE: "effasr_kernels.subsampling_stem.reference",
    },
    outputs=_outputs,
    flops=_flops,
    # A frame has 4 rows of 8 columns after the first convolution, 2 rows of 4 after the second.
    examples=[
        Example("subsampling_stem", _example, 2 * 9 * CHANNELS * 40 * (4 * 8 + 2 * 4)),
    ],
)
