"""Depthwise convolution along time and frequency with stride 2 within packed sequences."""

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.flops import known_lengths
from effasr_kernels.runtime.torch_op import DifferentiableOp


@dataclass(frozen=True, slots=True)
class StridedArguments:
    x: Tensor
    weight: Tensor
    bias: Tensor
    layout: PackedLayout
    lengths: Tensor
    relu: bool = False


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
    outputs=lambda a: a.x.new_empty(a.layout.rows, a.x.shape[1] // 2, a.x.shape[2]),
    flops=lambda a: 2 * sum(known_lengths(a.layout)) * (a.x.shape[1] // 2) * a.weight.numel(),
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

_NAME = OPERATION.name


def strided_depthwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    layout: PackedLayout,
    lengths: Tensor,
    *,
    relu: bool = False,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Convolve each channel with its own 3 x 3 taps and stride 2 within each sequence.

    .. math::
        y_{rfc} = b_c + \sum_{i,j=0}^{2} w_{c,3i+j} \, u_{2r+i-1, \, 2f+j-1, \, c}
        \quad \text{for } 2r < L, \text{ else } 0

    for a sequence of L rows, where u is x, or max(0, x) if ``relu``. Values
    outside the sequence or the bands are zero, and so are the rows of x past L, even if they
    contain NaN. Without ``relu`` this is `torch.nn.Conv2d` with ``groups=C, stride=2,
    padding=1``, applied to each sequence separately with channels last. A sequence of n rows in the
    layout has 2 n rows of x and n rows of y. Sums are computed in float32 (float64 for float64).
    Under autocast the floating arguments are cast as for a matrix product.

    Args:
        x: (2 T, G, C), floating point; G is even.
        weight: w, (C, 9), the dtype of ``x``.
        bias: b, (C,), the dtype of ``x``.
        layout: Layout of the rows of y, T in total.
        lengths: L, (N,), int32 or int64, on the device of ``x``; limited to 2 n.
        relu: Whether to apply ReLU to ``x``, without a pass of its own.
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        y, (T, G / 2, C), the dtype of ``x``; zero in the tail.

    Raises:
        ValueError: An argument is invalid.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.
    """
    x, weight, bias = checks.under_autocast(x, weight, bias)
    checks.check_shape(_NAME, "x", x, "(2 T, G, C)", 2 * layout.rows, None, None)
    if x.shape[1] % 2:
        raise checks.wrong(_NAME, "x", "have an even number of bands", tuple(x.shape))
    channels = x.shape[2]
    checks.check_shape(_NAME, "weight", weight, "(C, 9)", channels, 9)
    checks.check_shape(_NAME, "bias", bias, "(C,)", channels)
    checks.check_floating(_NAME, x=x, weight=weight, bias=bias)
    if x.device != layout.device:
        raise checks.wrong(_NAME, "layout", f"be on {x.device}, as `x` is", layout.device)
    checks.check_shape(_NAME, "lengths", lengths, "(N,)", layout.num_sequences)
    checks.check_integers(_NAME, "lengths", lengths, "x", x)
    return OPERATION(StridedArguments(x, weight, bias, layout, lengths, relu), backend)
