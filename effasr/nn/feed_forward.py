"""The position-wise feed-forward network."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from effasr.nn.linear import Linear
from effasr.nn.residual import Residual, is_fused
from effasr_kernels import bias_activation_dropout


class FeedForward(nn.Module):
    """Two linear layers with an activation between them: (T, width) to (T, width)."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: Literal["silu", "relu", "gelu"],
        bias: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.linear1 = Linear(width, hidden, bias=bias)
        self.linear2 = Linear(hidden, width, bias=bias)
        self.activation: Literal["silu", "relu", "gelu"] = activation
        self.dropout = dropout

    def forward(self, x: Tensor, residual: Residual | None = None, *, offset: int = 0) -> Tensor:
        """Transform each row; ``residual`` joins bias, activation and dropout number ``offset``."""
        # x: (..., width)
        if residual is None or not is_fused(x):
            x = ACTIVATIONS[self.activation](self.linear1(x))
            return self.linear2(F.dropout(x, self.dropout, self.training))
        # An adapter has its own addition; what it returns includes the bias.
        is_plain = type(self.linear1) is Linear
        y = bias_activation_dropout(
            self.linear1(x, with_bias=False) if is_plain else self.linear1(x),
            self.linear1.bias if is_plain else None,
            residual.layout,
            activation=self.activation,
            dropout=self.dropout if self.training else 0.0,
            seed=residual.seed,
            offset=offset,
        )
        return residual.project(self.linear2, y)


ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu}
"""The activations by name; GELU is the exact one."""
