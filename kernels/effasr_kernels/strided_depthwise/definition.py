"""Definition of `strided_depthwise`: arguments, backends, output shapes, FLOPs and examples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.flops import known_lengths
from effasr_kernels.runtime.torch_op import DifferentiableOp


@dataclass(frozen=True, slots=True)
class StridedArguments:
    """Validated arguments of a call.

    See `effasr_kernels.strided_depthwise.strided_depthwise`.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor
    layout: PackedLayout
    lengths: Tensor
    relu: bool = False


def _flops(a: StridedArguments) -> int:
    return 2 * sum(known_lengths(a.layout)) * (a.x.shape[1] // 2) * a.weight.numel()


def _example(inputs: ExampleInputs, relu: bool = False) -> Keywords:
    layout = inputs.frames()
    return {
        "x": inputs.floating(2 * layout.rows, 4, CHANNELS),
        "weight": inputs.floating(CHANNELS, 9),
        "bias": inputs.floating(CHANNELS),
        "layout": layout,
        "lengths": inputs.integers(48, 0, 31),
        "relu": relu,
    }


OPERATION = DifferentiableOp(
    "strided_depthwise",
    StridedArguments,
    {
        Backend.TRITON: "effasr_kernels.strided_depthwise._triton",
        Backend.REFERENCE: "effasr_kernels.strided_depthwise.reference",
    },
    outputs=lambda a: a.x.new_empty(a.layout.rows, a.x.shape[1] // 2, a.x.shape[2]),
    flops=_flops,
    # The result has two of the four bands.
    examples=[
        Example("strided_depthwise", _example, 2 * 9 * CHANNELS * 40 * 2),
        Example(
            "strided_depthwise, relu",
            lambda inputs: _example(inputs, relu=True),
            2 * 9 * CHANNELS * 40 * 2,
        ),
    ],
)
