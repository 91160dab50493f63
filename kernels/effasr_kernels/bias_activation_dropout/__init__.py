"""Bias, activation and dropout of a feed-forward network's inner rows, in one pass."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import DifferentiableOp
from effasr_kernels.shared.dropout import realised_rate, seed_for

ACTIVATIONS = ("silu", "relu", "gelu")


@dataclass(frozen=True, slots=True)
class ActivationArguments:
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
    outputs=lambda a: a.x.new_empty(a.x.shape),
    flops=lambda a: 0,  # no matrix products
    examples=[Example("bias_activation_dropout", _example, 0)],
)

_NAME = OPERATION.name


def bias_activation_dropout(
    x: Tensor,
    bias: Tensor | None,
    layout: PackedLayout,
    *,
    activation: Literal["silu", "relu", "gelu"],
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    offset: int = 0,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Add a bias, apply an activation, and drop elements.

    .. math:: y_{tc} = \mathrm{dropout}(f(x_{tc} + b_c))

    with f SiLU, ReLU or the exact GELU. Everything is computed in float32 (float64 for float64),
    and only the result is rounded. The backward computes f again from x; a backend on a GPU stores
    neither the activation nor which elements were dropped, and adds the gradient of the bias in the
    same pass, in a fixed order. Under autocast x is cast as for a matrix product; the bias keeps
    its dtype.

    Args:
        x: (T, C), floating point: rows of a matrix product without its bias.
        bias: b, (C,), floating point; None for zero.
        layout: Layout of the rows.
        activation: f.
        dropout: Probability to drop an element, in [0, 1); the others are divided by
            ``1 - dropout``. It is rounded to a multiple of 1/256.
        seed: Seed of the dropout; drawn from the device's global generator by default.
        offset: Distinguishes calls with the same seed, which drop other elements; in [0, 2^31).
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        y, (T, C), the dtype of ``x``; zero in the tail.

    Raises:
        ValueError: An argument is invalid.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.
    """
    (x,) = checks.under_autocast(x)
    checks.check_shape(_NAME, "x", x, "(T, C)", None, None)
    checks.check_rows(_NAME, "x", x, "layout", layout)
    checks.check_floating(_NAME, x=x)
    if bias is not None:
        checks.check_shape(_NAME, "bias", bias, "(C,)", x.shape[1])
        checks.check_beside(_NAME, "bias", bias, "x", x)
    if activation not in ACTIVATIONS:
        raise checks.wrong(_NAME, "activation", f"be one of {', '.join(ACTIVATIONS)}", activation)
    if not 0 <= dropout < 1:
        raise checks.wrong(_NAME, "dropout", "be in [0, 1)", dropout)
    if not 0 <= offset < 2**31:
        raise checks.wrong(_NAME, "offset", "be in [0, 2^31)", offset)
    dropout = realised_rate(dropout)
    seed = seed_for(dropout, seed, x.device)
    arguments = ActivationArguments(x, bias, seed, layout, activation, dropout, offset)
    return OPERATION(arguments, backend)
