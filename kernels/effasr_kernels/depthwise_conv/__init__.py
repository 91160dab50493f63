"""Depthwise convolution along time within packed sequences."""

from dataclasses import dataclass
from typing import Literal, overload

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.flops import known_lengths
from effasr_kernels.runtime.torch_op import DifferentiableOp
from effasr_kernels.shared.ragged import wide_dtype

_TAPS = 9
"""Number of taps in the example."""


@dataclass(frozen=True, slots=True)
class ConvArguments:
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
    outputs=_outputs,
    flops=lambda a: 2 * sum(known_lengths(a.layout)) * a.weight.numel(),
    results=3,
    undifferentiated=(1, 2),
    examples=[Example("depthwise_conv", _example, 2 * 40 * CHANNELS * _TAPS)],
)

_NAME = OPERATION.name


@overload
def depthwise_conv(
    x: Tensor,
    weight: Tensor,
    layout: PackedLayout,
    *,
    bias: Tensor | None = None,
    causal: bool = False,
    gated: bool = False,
    statistics: Literal[False] = False,
    backend: Backend | str | None = None,
) -> Tensor: ...


@overload
def depthwise_conv(
    x: Tensor,
    weight: Tensor,
    layout: PackedLayout,
    *,
    bias: Tensor | None = None,
    causal: bool = False,
    gated: bool = False,
    statistics: Literal[True],
    backend: Backend | str | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...


def depthwise_conv(
    x: Tensor,
    weight: Tensor,
    layout: PackedLayout,
    *,
    bias: Tensor | None = None,
    causal: bool = False,
    gated: bool = False,
    statistics: bool = False,
    backend: Backend | str | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    r"""Convolve each channel with its own taps, within each sequence.

    .. math:: y_{tc} = b_c + \sum_{k=0}^{K-1} w_{ck} \, u_{t + k - P, \, c}

    with P = K - 1 if ``causal``, else (K - 1) / 2; frames outside the sequence of t are zero. This
    is a correlation, as in `torch.nn.Conv1d`. The input u is x or, if ``gated``,

    .. math:: u_{tc} = x_{tc} \, \sigma(x_{t, \, C + c})

    as in `torch.nn.GLU`, fused with the convolution. Sums are computed in float32 (float64 for
    float64), and u is not rounded. Under autocast the floating arguments are cast as for a matrix
    product.

    Args:
        x: (T, C), or (T, 2C) if ``gated``; floating point.
        weight: w, (C, K), the dtype of ``x``; K is odd unless ``causal``.
        layout: Layout of ``x``.
        bias: b, (C,), the dtype of ``x``; zero by default. Not added in the tail.
        causal: Whether a frame depends only on itself and the K - 1 frames before it.
        gated: Whether the second half of the channels of ``x`` gates the first half.
        statistics: Whether to also return the mean and variance that batch normalization needs.
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        y, (T, C), the dtype of ``x``. With ``statistics``, a tuple of y and the mean and biased
        variance of each channel of y, computed from values rounded to its dtype over all rows
        except the tail: (C,), float32 (float64 for float64), both 0 if all sequences are empty. No
        gradient flows through them: the backward of batch normalization includes their derivatives.

    Raises:
        ValueError: An argument is invalid.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.
    """
    x, weight, bias = checks.under_autocast(x, weight, bias)
    checks.check_shape(_NAME, "x", x, "(T, 2C)" if gated else "(T, C)", None, None)
    checks.check_rows(_NAME, "x", x, "layout", layout)
    channels = x.shape[1]
    if gated:
        if channels % 2:
            raise checks.wrong(_NAME, "x", "have an even width, as it is gated", channels)
        channels //= 2
    checks.check_shape(_NAME, "weight", weight, "(C, K)", channels, None)
    taps = weight.shape[1]
    if taps == 0:
        raise checks.wrong(_NAME, "weight", "have at least one tap", taps)
    if taps % 2 == 0 and not causal:
        raise checks.wrong(_NAME, "weight", "have an odd number of taps unless causal", taps)
    if bias is not None:
        checks.check_shape(_NAME, "bias", bias, "(C,)", channels)
    checks.check_floating(_NAME, x=x, weight=weight, bias=bias)
    arguments = ConvArguments(x, weight, layout, bias, causal, gated, statistics)
    y, mean, variance = OPERATION(arguments, backend)
    return (y, mean.detach(), variance.detach()) if statistics else y
