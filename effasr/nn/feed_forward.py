"""The position-wise feed-forward network."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from effasr.nn.linear import Linear


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
        """Build two layers with ``hidden`` channels between them; GELU is the exact one."""
        super().__init__()
        self.linear1 = Linear(width, hidden, bias=bias)
        self.linear2 = Linear(hidden, width, bias=bias)
        self.activation = activation
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Transform each row."""
        x = self.linear1(x)
        x = _ACTIVATIONS[self.activation](x)
        return self.linear2(F.dropout(x, self.dropout, self.training))


_ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu}
