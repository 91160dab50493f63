"""Batch normalization of packed sequences, with the activation that follows it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import DifferentiableOp


@dataclass(frozen=True, slots=True)
class BatchNormArguments:
    x: Tensor
    weight: Tensor
    bias: Tensor
    mean: Tensor
    variance: Tensor
    layout: PackedLayout
    eps: float
    silu: bool
    fixed: bool


def _example(inputs: ExampleInputs, **options: Any) -> Keywords:
    layout = inputs.frames()
    return {
        "x": inputs.floating(layout.rows, CHANNELS),
        "weight": inputs.floating(CHANNELS),
        "bias": inputs.floating(CHANNELS),
        # Without a gradient, as the statistics of every call.
        "mean": inputs.integers(*[0] * CHANNELS, dtype=torch.float32),
        "variance": inputs.integers(*[1] * CHANNELS, dtype=torch.float32),
        "layout": layout,
        **options,
    }


OPERATION = DifferentiableOp(
    "batch_norm",
    BatchNormArguments,
    outputs=lambda a: a.x.new_empty(a.x.shape),
    flops=lambda a: 0,  # no matrix products
    examples=[
        Example("batch_norm, silu", lambda inputs: _example(inputs, silu=True), 0),
        Example("batch_norm, fixed", lambda inputs: _example(inputs, fixed=True), 0),
    ],
)

_NAME = OPERATION.name


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    layout: PackedLayout,
    *,
    eps: float = 1e-5,
    silu: bool = False,
    fixed: bool = False,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Normalize each channel by given statistics, and apply SiLU in the same pass.

    .. math::
        z_{tc} = w_c \, \frac{x_{tc} - m_c}{\sqrt{v_c + \varepsilon}} + b_c, \qquad
        y_{tc} = z_{tc} \, \sigma(z_{tc}) \; \text{if silu, else } z_{tc}

    In training m and v are the mean and the biased variance of x over all rows except the tail, as
    `effasr_kernels.depthwise_conv` returns them; the gradient of x includes their derivatives. With
    ``fixed`` they are constants, such as running statistics. Values are computed in float32
    (float64 for float64) and rounded once. Under autocast x is cast as for a matrix product;
    parameters and statistics keep their dtypes, as a cast would cost a kernel for each.

    For an element of 2 bytes the forward moves 4 bytes. The backward moves 10: one pass for the
    sums of each channel and one for the gradient, which both compute z again.

    Args:
        x: (T, C), floating point.
        weight: w, (C,), floating point.
        bias: b, (C,), the dtype of ``weight``.
        mean: m, (C,), floating point, without a gradient.
        variance: v, (C,), the dtype of ``mean``, without a gradient.
        layout: Layout of ``x``.
        eps: Added to the variance; positive.
        silu: Whether to apply SiLU to the normalized values.
        fixed: Whether the statistics do not depend on ``x``.
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        y, (T, C), the dtype of ``x``; zero in the tail.

    Raises:
        ValueError: An argument is invalid.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.

    References:
        Ioffe and Szegedy, 2015, https://arxiv.org/abs/1502.03167.
    """
    (x,) = checks.under_autocast(x)
    checks.check_shape(_NAME, "x", x, "(T, C)", None, None)
    checks.check_rows(_NAME, "x", x, "layout", layout)
    channels = x.shape[1]
    checks.check_shape(_NAME, "weight", weight, "(C,)", channels)
    checks.check_shape(_NAME, "bias", bias, "(C,)", channels)
    checks.check_shape(_NAME, "mean", mean, "(C,)", channels)
    checks.check_shape(_NAME, "variance", variance, "(C,)", channels)
    checks.check_floating(_NAME, x=x)
    checks.check_floating(_NAME, weight=weight, bias=bias)
    checks.check_floating(_NAME, mean=mean, variance=variance)
    for name, value in (("weight", weight), ("mean", mean)):
        if value.device != x.device:
            raise checks.wrong(_NAME, name, f"be on {x.device}, as `x` is", value.device)
    for name, value in (("mean", mean), ("variance", variance)):
        if value.requires_grad:
            rule = "not require a gradient, as that of `x` includes it: call detach()"
            raise checks.wrong(_NAME, name, rule, "a tensor that does")
    if not eps > 0:
        raise checks.wrong(_NAME, "eps", "be positive", eps)
    arguments = BatchNormArguments(x, weight, bias, mean, variance, layout, eps, silu, fixed)
    return OPERATION(arguments, backend)
