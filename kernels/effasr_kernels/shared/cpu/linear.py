"""Linear layers on CPUs with oneDNN's matrix products, where they are faster than MKL's.

`torch.nn.functional.linear` calls MKL for float32. On AMD processors MKL does not use AVX-512:
with one thread of an EPYC it reaches 75 to 95 GFLOP/s where oneDNN reaches 160 to 220 in the
forward and in the gradient of the input, and 100 to 170 in the gradient of the weight
(1,000 to 4,000 rows, 96 to 2,048 channels). Small products use MKL: its calls cost less.
"""

import functools
import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

_LEAST = 1_500_000
"""Minimum multiply-adds for which oneDNN is faster; twice this for the gradient of the weight."""
_NARROW = 32
"""MKL is faster for the gradient of a weight that has no more rows and columns than this."""


def has_onednn() -> bool:
    """Return whether oneDNN's linear layer for x86-64 processors is available and enabled."""
    # ``torch.backends.mkldnn.flags(enabled=False)`` disables it.
    return _is_built() and bool(torch.backends.mkldnn.enabled)


@functools.cache
def _is_built() -> bool:
    is_x86 = platform.machine().lower() in {"x86_64", "amd64"}
    return (
        is_x86
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear`, faster for float32 in training on CPUs."""
    # It calls torch for other devices and dtypes, under autocast, in compiled graphs, for products
    # too small to gain, and in inference, where a row's result must not depend on the number of
    # rows. Returns (..., N).
    if (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() * weight.shape[0] >= _LEAST
        and has_onednn()
        and not torch.is_autocast_enabled("cpu")
    ):
        return _OnednnLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


class _OnednnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (dy,) = grad_outputs
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx = onednn_product(dy, weight.T) if needs_x else None
        dweight = _weight_gradient(dy, x) if needs_weight else None
        return dx, dweight, dy.sum(0) if needs_bias else None


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Return ``dy.T @ x``, contiguous (N, K)."""
    outputs, inputs = dy.shape[1], x.shape[1]
    is_large = x.numel() * outputs >= 2 * _LEAST and max(outputs, inputs) > _NARROW
    product = onednn_product if is_large else F.linear
    # Each product copies its first operand, as it is transposed: the narrower of the two. With
    # 4,000 rows, 384 outputs and 96 inputs that takes 1.9 ms in place of 2.8 ms.
    if outputs > inputs:
        return product(x.T, dy.T).T.contiguous()
    return product(dy.T, x.T)


def onednn_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``rows @ weight.T + bias``, float32 (M, N) on a CPU, without gradient."""
    # It requires `has_onednn`.
    # With a weight from `onednn_weight` a row's result does not depend on the number of rows.
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


def onednn_weight(weight: Tensor) -> Tensor:
    """Return a weight (N, K) in oneDNN's memory format, only usable in `onednn_product`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


if _is_built():

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _flops(x: Any, weight: Any, *_: object, out_shape: Any = None, **__: object) -> int:
        return 2 * x[0] * x[1] * weight[0]
