"""The Conformer's convolution module, and its batch normalisation over real rows."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.nn.linear import Linear
from effasr.nn.residual import Residual
from effasr.nn.stack import is_recomputing
from effasr_kernels import PackedLayout, batch_norm, depthwise_conv, update_running_statistics


class BatchNorm(nn.Module):
    """`torch.nn.BatchNorm1d` over real rows only, with the same parameters and buffers.

    Padded trainers include padding in these statistics. Statistics and sums are float32 (float64
    for float64), of each process alone; a forward that activation checkpointing repeats does not
    count again.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.register_buffer("running_mean", torch.empty(channels))
        self.register_buffer("running_var", torch.empty(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for ones in (self.weight, self.running_var):
            nn.init.ones_(ones)
        for zeros in (self.bias, self.running_mean, self.num_batches_tracked):
            nn.init.zeros_(zeros)

    def forward(
        self, x: Tensor, layout: PackedLayout, statistics: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Normalise each channel and apply SiLU.

        ``statistics`` are mean and biased variance of the real rows, in training alone, as the
        operation that made ``x`` has computed them; the gradient is the same.
        """
        # x: (T, C) -> (T, C)
        if statistics is None:
            statistics = self.running_mean, self.running_var
        # In its own recomputation the compiler omits the update.
        elif torch.compiler.is_compiling() or not is_recomputing():
            update_running_statistics(
                self.running_mean,
                self.running_var,
                self.num_batches_tracked,
                *statistics,
                layout,
                momentum=self.momentum,
            )
        return batch_norm(
            x,
            self.weight,
            self.bias,
            *statistics,
            layout,
            eps=self.eps,
            silu=True,
            fixed=not self.training,
        )


class DepthwiseConv(nn.Module):
    """A depthwise convolution over time that stops at the ends of sequences.

    The input is gated as by `torch.nn.GLU`, without storing the gated tensor. If ``causal``, a row
    depends on itself and the K - 1 rows before it, else on (K - 1) / 2 rows on either side.
    """

    def __init__(self, channels: int, taps: int, *, bias: bool = True, causal: bool = False):
        super().__init__()
        self.causal = causal
        self.weight = nn.Parameter(torch.empty(channels, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self, x: Tensor, layout: PackedLayout, *, statistics: bool = False
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Gate and convolve (T, 2C) to (T, C); ``statistics``: also mean and biased variance."""
        return depthwise_conv(
            x,
            self.weight,
            layout,
            bias=self.bias,
            causal=self.causal,
            gated=True,
            statistics=statistics,
        )


class ConformerConvolution(nn.Module):
    """Linear, gate, depthwise convolution, norm, SiLU, linear: https://arxiv.org/abs/2005.08100."""

    def __init__(
        self,
        width: int,
        taps: int,
        *,
        norm: Literal["batch_norm", "layer_norm"],
        bias: bool = True,
        causal: bool = False,
    ):
        super().__init__()
        self.pointwise1 = Linear(width, 2 * width, bias=bias)
        self.depthwise = DepthwiseConv(width, taps, bias=bias, causal=causal)
        self.norm = BatchNorm(width) if norm == "batch_norm" else nn.LayerNorm(width)
        self.pointwise2 = Linear(width, width, bias=bias)

    def forward(self, x: Tensor, layout: PackedLayout, residual: Residual | None = None) -> Tensor:
        x = self.pointwise1(x)
        if not isinstance(self.norm, BatchNorm):
            x = F.silu(self.norm(self.depthwise(x, layout)))
        elif self.norm.training:
            x, *statistics = self.depthwise(x, layout, statistics=True)
            x = self.norm(x, layout, tuple(statistics))
        else:
            x = self.norm(self.depthwise(x, layout), layout)
        return self.pointwise2(x) if residual is None else residual.project(self.pointwise2, x)
