"""Definition of `grouped_linear`: arguments, backends, output shape, FLOPs and examples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, FRAMES, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.flops import known_lengths
from effasr_kernels.runtime.torch_op import DifferentiableOp

_OUTPUTS = 48
"""Output channels in the example."""


@dataclass(frozen=True, slots=True)
class GroupedLinearArguments:
    """Validated arguments of a call; see `effasr_kernels.grouped_linear.grouped_linear`.

    Attributes:
        frozen: Whether neither ``weight`` nor ``bias`` has a gradient, so that none is computed.
    """

    x: Tensor
    weight: Tensor
    layout: PackedLayout
    bias: Tensor | None
    frozen: bool = False


def _example(inputs: ExampleInputs) -> Keywords:
    layout, groups = inputs.frames(), len(FRAMES)
    return {
        "x": inputs.floating(layout.rows, CHANNELS),
        "weight": inputs.floating(groups, _OUTPUTS, CHANNELS),
        "layout": layout,
        "bias": inputs.floating(groups, _OUTPUTS),
    }


OPERATION = DifferentiableOp(
    "grouped_linear",
    GroupedLinearArguments,
    {
        Backend.TRITON: "effasr_kernels.grouped_linear._triton",
        Backend.REFERENCE: "effasr_kernels.grouped_linear.reference",
    },
    outputs=lambda a: a.x.new_empty(a.x.shape[0], a.weight.shape[1]),
    # A row is multiplied by the weight of its own group alone.
    flops=lambda a: 2 * sum(known_lengths(a.layout)) * a.weight.shape[1] * a.weight.shape[2],
    examples=[Example("grouped_linear", _example, 2 * 40 * CHANNELS * _OUTPUTS)],
)
