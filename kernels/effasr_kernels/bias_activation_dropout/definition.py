"""Definition of `bias_activation_dropout`: arguments, backends, output shape and examples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import DifferentiableOp

ACTIVATIONS = ("silu", "relu", "gelu")


@dataclass(frozen=True, slots=True)
class ActivationArguments:
    """Validated arguments of a call.

    See `effasr_kernels.bias_activation_dropout.bias_activation_dropout`.
    """

    x: Tensor
    bias: Tensor | None
    seed: Tensor | None
    layout: PackedLayout
    activation: str
    dropout: float
    offset: int


def _example(inputs: ExampleInputs) -> Keywords:
    layout = inputs.frames()
    return {
        "x": inputs.floating(layout.rows, CHANNELS),
        "bias": inputs.floating(CHANNELS),
        "layout": layout,
        "activation": "silu",
    }


OPERATION = DifferentiableOp(
    "bias_activation_dropout",
    ActivationArguments,
    {
        Backend.TRITON: "effasr_kernels.bias_activation_dropout._triton",
        Backend.REFERENCE: "effasr_kernels.bias_activation_dropout.reference",
    },
    outputs=lambda a: a.x.new_empty(a.x.shape),
    # No products: the operation moves bytes.
    flops=lambda a: 0,
    examples=[Example("bias_activation_dropout", _example, 0)],
)
