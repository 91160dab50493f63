"""A separate linear layer for each group of rows."""

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, FRAMES, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.flops import known_lengths
from effasr_kernels.runtime.torch_op import DifferentiableOp

_OUTPUTS = 48
"""Output channels in the example."""


@dataclass(frozen=True, slots=True)
class GroupedLinearArguments:
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
    outputs=lambda a: a.x.new_empty(a.x.shape[0], a.weight.shape[1]),
    # A row is multiplied by the weight of its group alone.
    flops=lambda a: 2 * sum(known_lengths(a.layout)) * a.weight.shape[1] * a.weight.shape[2],
    examples=[Example("grouped_linear", _example, 2 * 40 * CHANNELS * _OUTPUTS)],
)

_NAME = OPERATION.name


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    layout: PackedLayout,
    *,
    bias: Tensor | None = None,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Multiply each group of rows by the weight of this group.

    .. math:: y_t = W_g x_t + b_g

    for the rows t of group g. The groups are the sequences of ``layout``, in order, such as rows
    that were sorted by their expert; a group may be empty, and its weight then has a zero gradient.
    Backends on a GPU read the offsets on the device, so that sizes of groups may change between
    replays of a CUDA graph. Sums are computed in float32 (float64 for float64), in a fixed order.
    Under autocast the floating arguments are cast as for a matrix product.

    Args:
        x: (T, C), floating point.
        weight: W, (G, F, C), the dtype of ``x``, as G weights of `torch.nn.Linear`.
        layout: Layout of ``x``: N = G groups.
        bias: b, (G, F), the dtype of ``x``; zero by default. Not added in the tail.
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        y, (T, F), the dtype of ``x``; zero in the tail.

    Raises:
        ValueError: An argument is invalid.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.

    References:
        Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, 2022,
        https://arxiv.org/abs/2211.15841.
    """
    x, weight, bias = checks.under_autocast(x, weight, bias)
    checks.check_shape(_NAME, "x", x, "(T, C)", None, None)
    checks.check_rows(_NAME, "x", x, "layout", layout)
    checks.check_shape(_NAME, "weight", weight, "(G, F, C)", layout.num_sequences, None, x.shape[1])
    groups, outputs, _ = weight.shape
    if groups == 0:
        raise checks.wrong(_NAME, "weight", "have at least one group", groups)
    if bias is not None:
        checks.check_shape(_NAME, "bias", bias, "(G, F)", groups, outputs)
    checks.check_floating(_NAME, x=x, weight=weight, bias=bias)
    frozen = not (weight.requires_grad or (bias is not None and bias.requires_grad))
    return OPERATION(GroupedLinearArguments(x, weight, layout, bias, frozen), backend)
