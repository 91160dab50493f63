"""A convolution of each channel along time that stops at the ends of sequences."""

from __future__ import annotations

from torch import Tensor

from effasr_kernels import checks
from effasr_kernels.depthwise_conv.registration import call, op
from effasr_kernels.dispatch import Backend
from effasr_kernels.packed import PackedLayout

__all__ = ["depthwise_conv", "op"]


def depthwise_conv(
    x: Tensor,
    weight: Tensor,
    layout: PackedLayout,
    *,
    bias: Tensor | None = None,
    causal: bool = False,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Convolve each channel with its own taps, within each sequence.

    .. math:: y_{tc} = b_c + \sum_{k=0}^{K-1} w_{ck} \, x_{t + k - P, \, c}

    with P = K - 1 where ``causal``, else (K - 1) / 2; frames outside the sequence of t count as
    zero. It is a correlation, as in `torch.nn.Conv1d`. Sums are taken in float32 (in float64
    for float64). Under autocast the floating arguments are cast as for a matrix product.

    Args:
        x: (T, C), floating point.
        weight: w, (C, K), the dtype of ``x``; K is odd unless ``causal``.
        layout: The sequences of ``x``.
        bias: b, (C,), the dtype of ``x``; zero by default. Not added in the tail.
        causal: Whether a frame sees only itself and the K - 1 before it.
        backend: Implementation to use; the fastest that can serve the call by default.

    Returns:
        (T, C), the dtype of ``x``.

    Raises:
        ValueError: An argument is not as above.
        BackendUnavailable: See `effasr_kernels.dispatch.Op.select`.
    """
    x, weight, bias = checks.under_autocast(x, weight, bias)
    checks.check_shape(op.name, "x", x, "(T, C)", None, None)
    checks.check_rows(op.name, "x", x, "layout", layout)
    checks.check_shape(op.name, "weight", weight, "(C, K)", x.shape[1], None)
    taps = weight.shape[1]
    if taps == 0:
        raise checks.wrong(op.name, "weight", "have at least one tap", taps)
    if taps % 2 == 0 and not causal:
        raise checks.wrong(op.name, "weight", "have an odd number of taps unless causal", taps)
    if bias is not None:
        checks.check_shape(op.name, "bias", bias, "(C,)", x.shape[1])
    checks.check_floating(op.name, x=x, weight=weight, bias=bias)
    return call(x, weight, layout, bias=bias, causal=causal, backend=backend)
