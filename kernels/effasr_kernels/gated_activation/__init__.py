"""Product of activated gates and values in a gated feed-forward network, in one pass."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import DifferentiableOp

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class GatedArguments:
    gate: Tensor
    up: Tensor
    activation: str


def _example(inputs: ExampleInputs) -> Keywords:
    gate, up = inputs.floating(6, CHANNELS), inputs.floating(6, CHANNELS)
    return {"gate": gate, "up": up, "activation": "silu"}


OPERATION = DifferentiableOp(
    "gated_activation",
    GatedArguments,
    outputs=lambda a: a.gate.new_empty(a.gate.shape),
    flops=lambda a: 0,  # no matrix products
    examples=[Example("gated_activation", _example, 0)],
)

_NAME = OPERATION.name


def gated_activation(
    gate: Tensor,
    up: Tensor,
    *,
    activation: Literal["silu", "gelu", "gelu_tanh"],
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Multiply values by activated gates, as between the products of a SwiGLU or GeGLU network.

    .. math:: y_{tc} = f(g_{tc}) \, u_{tc}

    with f SiLU, the exact GELU, or its approximation by a hyperbolic tangent. Everything is
    computed in float32 (float64 for float64), and only the result is rounded. The backward computes
    f again from the gates; a backend on a GPU writes both gradients in one pass. There is no
    layout: each element stands alone. Under autocast both are cast as for a matrix product.

    Args:
        gate: g, (..., W), floating point; the halves of one product need not be copied.
        up: u, (..., W), the dtype of ``gate``.
        activation: f; ``gelu_tanh`` is the approximation.
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        y, (..., W), the dtype of ``gate``.

    Raises:
        ValueError: An argument is invalid.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.

    References:
        Shazeer, 2020, https://arxiv.org/abs/2002.05202.
    """
    gate, up = checks.under_autocast(gate, up)
    if gate.ndim < 2:
        raise checks.wrong(_NAME, "gate", "have shape (..., W)", tuple(gate.shape))
    checks.check_shape(_NAME, "up", up, "that of `gate`", *gate.shape)
    checks.check_floating(_NAME, gate=gate, up=up)
    if activation not in ACTIVATIONS:
        raise checks.wrong(_NAME, "activation", f"be one of {', '.join(ACTIVATIONS)}", activation)
    if gate.ndim == 2:
        return OPERATION(GatedArguments(gate, up, activation), backend)
    rows = gate.flatten(0, -2), up.flatten(0, -2)
    return OPERATION(GatedArguments(*rows, activation), backend).view(gate.shape)
