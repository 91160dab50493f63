"""First two convolutions of the encoder, fused without storing the activation between them."""

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import BANDS, CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.flops import known_lengths
from effasr_kernels.runtime.torch_op import DifferentiableOp


@dataclass(frozen=True, slots=True)
class StemArguments:
    x: Tensor
    weight: Tensor
    bias: Tensor
    depthwise_weight: Tensor
    depthwise_bias: Tensor
    layout: PackedLayout
    lengths: Tensor
    rows_per_slot: int = 8


def _flops(a: StemArguments) -> int:
    rows, bins = a.rows_per_slot * sum(known_lengths(a.layout)), a.x.shape[1]
    channels = a.weight.shape[0]
    outputs = rows // 2 * (bins // 2) + rows // 4 * (bins // 4)
    return 2 * 9 * channels * outputs


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
    outputs=lambda a: a.x.new_empty(a.x.shape[0] // 4, a.x.shape[1] // 4, a.weight.shape[0]),
    flops=_flops,
    # A frame has 4 rows of 8 columns after the first convolution, 2 rows of 4 after the second.
    examples=[Example("subsampling_stem", _example, 2 * 9 * CHANNELS * 40 * (4 * 8 + 2 * 4))],
)

_NAME = OPERATION.name


def subsampling_stem(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    layout: PackedLayout,
    lengths: Tensor,
    *,
    rows_per_slot: int = 8,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Subsample time and frequency by 4 with two 3 x 3 convolutions of stride 2 per utterance.

    .. math::
        z_{qgc} &= \max\Big(0, \; b_c + \sum_{i,j=0}^{2} w_{c,3i+j} \, x_{2q+i-1, \, 2g+j-1}\Big)
        \quad \text{for } 2q < L, \text{ else } 0 \\
        y_{rfc} &= b'_c + \sum_{i,j=0}^{2} w'_{c,3i+j} \, z_{2r+i-1, \, 2f+j-1, \, c}
        \quad \text{for } 4r < L, \text{ else } 0

    for an utterance of L mel rows. Values outside the utterance or the bands are zero, and so are
    the rows of x past L, even if they contain NaN. These are the first layers of Hugging Face's
    ``ParakeetEncoderSubsamplingConv2D`` with their masks, applied to each utterance separately. An
    utterance of n encoder frames has s n rows of x and s n / 4 rows of y.

    Sums are computed in float32 (float64 for float64), and z is not rounded. For 420,000 rows of 80
    bands and 256 channels z has 2^31 elements; kernels recompute it. Only the reference computes a
    gradient of x. Under autocast the floating arguments are cast as for a matrix product.

    Args:
        x: (s T, F), floating point; F is a multiple of 4.
        weight: w, (C, 9), the dtype of ``x``.
        bias: b, (C,), the dtype of ``x``.
        depthwise_weight: w', (C, 9), the dtype of ``x``.
        depthwise_bias: b', (C,), the dtype of ``x``.
        layout: Layout of the encoder frames, T in total.
        lengths: L, (N,), int32 or int64, on the device of ``x``; limited to s n.
        rows_per_slot: s, rows of ``x`` per encoder frame, a multiple of 4.
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        y, (s T / 4, F / 4, C), the dtype of ``x``; zero in the tail.

    Raises:
        ValueError: An argument is invalid.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.
    """
    x, weight, bias, depthwise_weight, depthwise_bias = checks.under_autocast(
        x, weight, bias, depthwise_weight, depthwise_bias
    )
    if rows_per_slot < 4 or rows_per_slot % 4:
        raise checks.wrong(_NAME, "rows_per_slot", "be a positive multiple of 4", rows_per_slot)
    checks.check_shape(_NAME, "x", x, f"({rows_per_slot} T, F)", rows_per_slot * layout.rows, None)
    if x.shape[1] % 4:
        raise checks.wrong(_NAME, "x", "have a multiple of 4 bands", tuple(x.shape))
    checks.check_shape(_NAME, "weight", weight, "(C, 9)", None, 9)
    channels = weight.shape[0]
    checks.check_shape(_NAME, "bias", bias, "(C,)", channels)
    checks.check_shape(_NAME, "depthwise_weight", depthwise_weight, "(C, 9)", channels, 9)
    checks.check_shape(_NAME, "depthwise_bias", depthwise_bias, "(C,)", channels)
    checks.check_floating(
        _NAME,
        x=x,
        weight=weight,
        bias=bias,
        depthwise_weight=depthwise_weight,
        depthwise_bias=depthwise_bias,
    )
    if x.device != layout.device:
        raise checks.wrong(_NAME, "layout", f"be on {x.device}, as `x` is", layout.device)
    checks.check_shape(_NAME, "lengths", lengths, "(N,)", layout.num_sequences)
    checks.check_integers(_NAME, "lengths", lengths, "x", x)
    arguments = StemArguments(
        x, weight, bias, depthwise_weight, depthwise_bias, layout, lengths, rows_per_slot
    )
    return OPERATION(arguments, backend)
