"""A pre-norm Transformer layer over packed sequences."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from effasr.nn.attention import SelfAttention
from effasr.nn.feed_forward import FeedForward
from effasr.nn.stack import Layer, checkpointed_forward
from effasr_kernels import PackedLayout


class TransformerLayer(Layer):
    """Self-attention and a feed-forward network, each after a LayerNorm."""

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        feed_forward: int,
        activation: Literal["relu", "gelu"],
        bias: bool = True,
        key_bias: bool = True,
        residual_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ):
        """Build the layer.

        Args:
            width: Channels in and out.
            heads: Of attention; they divide the width.
            feed_forward: Channels inside the feed-forward network.
            activation: There.
            bias: Whether the projections of attention have biases.
            key_bias: Whether that of the keys has.
            residual_dropout: On the output of each module, before it is added.
            activation_dropout: Inside the feed-forward network.
            attention_dropout: On attention weights.
        """
        super().__init__()
        self.dropout = residual_dropout
        self.norm_self_att = nn.LayerNorm(width)
        self.self_attn = SelfAttention(
            width,
            heads,
            width // heads,
            bias=bias,
            key_bias=key_bias,
            dropout=attention_dropout,
        )
        self.norm_feed_forward = nn.LayerNorm(width)
        self.feed_forward = FeedForward(
            width, feed_forward, activation=activation, dropout=activation_dropout
        )

    @checkpointed_forward
    def forward(self, x: Tensor, layout: PackedLayout) -> Tensor:
        """Transform (T, width)."""
        x = x + self._drop(self.self_attn(self.norm_self_att(x), layout))
        return x + self._drop(self.feed_forward(self.norm_feed_forward(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)
