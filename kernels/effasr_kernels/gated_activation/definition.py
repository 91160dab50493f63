"""Definition of `gated_activation`: arguments, backends, output shape and examples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import DifferentiableOp

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class GatedArguments:
    """Validated arguments of a call; see `effasr_kernels.gated_activation.gated_activation`.

    Attributes:
        gate: (T, W).
        up: (T, W).
    """

    gate: Tensor
    up: Tensor
    activation: str


def _example(inputs: ExampleInputs) -> Keywords:
    gate, up = inputs.floating(6, CHANNELS), inputs.floating(6, CHANNELS)
    return {"gate": gate, "up": up, "activation": "silu"}


OPERATION = DifferentiableOp(
    "gated_activation",
    GatedArguments,
    {
        Backend.TRITON: "effasr_kernels.gated_activation._triton",
        Backend.REFERENCE: "effasr_kernels.gated_activation.reference",
    },
    outputs=lambda a: a.gate.new_empty(a.gate.shape),
    # No products: the operation moves bytes.
    flops=lambda a: 0,
    examples=[Example("gated_activation", _example, 0)],
)
