"""Batch normalisation over the rows that belong to an utterance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from effasr.nn.stack import is_recomputing
from effasr_kernels import PackedLayout


class BatchNorm(nn.Module):
    """`torch.nn.BatchNorm1d` of packed rows, which ignores the tail of a static shape.

    Statistics and sums are float32 (float64 for float64), whatever the dtype of the rows.
    Parameters and buffers are those of the torch module, so a ``state_dict`` of one fits the other.
    Each process has its own statistics; a forward that activation checkpointing repeats does not
    count again.

    Padded trainers include padding in these statistics; this module counts real rows only.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float = 0.1):
        """Start with mean 0 and variance 1."""
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.register_buffer("running_mean", torch.empty(channels))
        self.register_buffer("running_var", torch.empty(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset parameters and running statistics."""
        for ones in (self.weight, self.running_var):
            nn.init.ones_(ones)
        for zeros in (self.bias, self.running_mean, self.num_batches_tracked):
            nn.init.zeros_(zeros)

    def forward(
        self,
        x: Tensor,
        layout: PackedLayout,
        mask: Tensor | None,
        statistics: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Normalise each channel, in training by the statistics of this batch.

        Args:
            x: (T, C).
            layout: The sequences of ``x``.
            mask: bool (T, 1), True for real rows; None if ``layout`` has no tail.
            statistics: Mean and biased variance of the real rows, (C,), in the dtype of sums, if
                the operation that made ``x`` has computed them; the gradient is the same. Used in
                training only.

        Returns:
            (T, C), the dtype of ``x``; rows of the tail are finite.
        """
        if not self.training:
            scale = self.weight * (self.running_var + self.eps).rsqrt()
            return (_wide(x) * scale + (self.bias - self.running_mean * scale)).to(x.dtype)
        count = layout.cu_seqlens[-1].to(_wide(x).dtype)
        mean, variance = _statistics(x, mask, count) if statistics is None else statistics
        # In its own recomputation the compiler omits the update.
        if torch.compiler.is_compiling() or not is_recomputing():
            self._update(mean, variance, count)
        return _Normalise.apply(  # type: ignore[return-value]
            x, self.weight, self.bias, mask, count, mean, (variance + self.eps).rsqrt()
        )

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        # A batch without a real row has the weight 0.
        share = self.momentum * (count > 0)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        self.num_batches_tracked.add_(1)


@torch.no_grad()
def _statistics(x: Tensor, mask: Tensor | None, count: Tensor) -> tuple[Tensor, Tensor]:
    count = count.clamp(min=1)
    mean = _masked(_wide(x), mask).sum(0) / count
    return mean, _masked(_wide(x) - mean, mask).square().sum(0) / count


class _Normalise(Function):
    """Scale and shift by the statistics of x; the backward includes their gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mask: Tensor | None,
        count: Tensor,
        mean: Tensor,
        rstd: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mask, mean, rstd, count.clamp(min=1))
        centred = _masked(_wide(x) - mean, mask)
        return torch.addcmul(bias, centred, rstd * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (dy,) = grad_outputs
        x, weight, mask, mean, rstd, count = ctx.saved_tensors
        dy_wide = _masked(_wide(dy), mask)
        normal = _masked((_wide(x) - mean) * rstd, mask)
        dweight, dbias = (dy_wide * normal).sum(0), dy_wide.sum(0)
        dx = (dy_wide - (normal * dweight + dbias) / count) * (weight * rstd)
        dx = _masked(dx, mask).to(x.dtype)
        return dx, dweight.to(weight.dtype), dbias.to(weight.dtype), None, None, None, None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else torch.where(mask, x, 0.0)
