"""The Conformer's convolution module."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.nn.linear import Linear
from effasr.nn.norms import BatchNorm
from effasr.nn.residual import Residual
from effasr_kernels import PackedLayout, depthwise_conv


class DepthwiseConv(nn.Module):
    """A depthwise convolution over time that stops at the ends of sequences.

    The input is gated as by `torch.nn.GLU`, without storing the gated tensor.
    """

    def __init__(self, channels: int, taps: int, *, bias: bool = True, causal: bool = False):
        """Build the filters: ``taps`` is the kernel size K, odd.

        If ``causal``, a row depends on itself and the K - 1 rows before it, else on (K - 1) / 2
        rows on either side.
        """
        super().__init__()
        self.causal = causal
        self.weight = nn.Parameter(torch.empty(channels, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the filters as `torch.nn.Conv1d` does."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self, x: Tensor, layout: PackedLayout, *, statistics: bool = False
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Gate and convolve (T, 2C) to (T, C), with zeros beyond the ends of each sequence.

        With ``statistics``, also return the mean and the biased variance of each channel of the
        result, for `effasr.nn.norms.BatchNorm`.
        """
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
    """Linear, gate, depthwise convolution, norm, SiLU, linear: (T, width) to (T, width).

    References:
        Gulati et al., 2020, https://arxiv.org/abs/2005.08100.
    """

    def __init__(
        self,
        width: int,
        taps: int,
        *,
        norm: Literal["batch_norm", "layer_norm"],
        bias: bool = True,
        causal: bool = False,
    ):
        """Build the module."""
        super().__init__()
        self.pointwise1 = Linear(width, 2 * width, bias=bias)
        self.depthwise = DepthwiseConv(width, taps, bias=bias, causal=causal)
        self.norm = BatchNorm(width) if norm == "batch_norm" else nn.LayerNorm(width)
        self.pointwise2 = Linear(width, width, bias=bias)

    def forward(self, x: Tensor, layout: PackedLayout, residual: Residual | None = None) -> Tensor:
        """Transform the rows of each sequence: (T, width) to (T, width).

        If ``residual`` is given, it must be given the result, with ``pointwise2``.
        """
        x = self.pointwise1(x)
        if not isinstance(self.norm, BatchNorm):
            x = F.silu(self.norm(self.depthwise(x, layout)))
        elif self.norm.training:
            x, *statistics = self.depthwise(x, layout, statistics=True)
            x = self.norm(x, layout, tuple(statistics), silu=True)
        else:
            x = self.norm(self.depthwise(x, layout), layout, silu=True)
        return self.pointwise2(x) if residual is None else residual.project(self.pointwise2, x)
