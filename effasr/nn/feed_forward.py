"""The position-wise feed-forward network."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from effasr.nn.linear import Linear
from effasr.nn.residual import Residual, is_fused
from effasr_kernels import bias_activation_dropout, gated_activation

Activation = Literal["silu", "relu", "gelu", "swiglu"]


class FeedForward(nn.Module):
    """Two linear layers with an activation between them: (T, width) to (T, width)."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: Activation,
        bias: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.linear1 = Linear(width, hidden * (1 + (activation == "swiglu")), bias=bias)
        self.linear2 = Linear(hidden, width, bias=bias)
        self.activation: Activation = activation
        self.dropout = dropout

    def forward(self, x: Tensor, residual: Residual | None = None, *, offset: int = 0) -> Tensor:
        """Transform each row; ``residual`` joins bias, activation and dropout number ``offset``."""
        # x: (..., width)
        if self.activation == "swiglu":
            # The first layer makes both.
            values, gates = self.linear1(x).chunk(2, -1)
            x = gated_activation(gates, values, activation="silu")
            x = F.dropout(x, self.dropout, self.training)
            return self.linear2(x) if residual is None else residual.project(self.linear2, x)
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
