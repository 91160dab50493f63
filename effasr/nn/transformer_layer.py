"""A Transformer layer over packed sequences."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn

from effasr.nn.attention import GatedBiasSelfAttention, SelfAttention
from effasr.nn.experts import ExpertsConfig, Groups, build_feed_forward, run_feed_forward
from effasr.nn.feed_forward import FeedForward
from effasr.nn.residual import Residual, normalized
from effasr.nn.stack import Layer, checkpointed_forward
from effasr_kernels import PackedLayout, Rotary

_DROPOUTS = "residual_dropout", "activation_dropout", "attention_dropout"


class TransformerLayer(Layer):
    """Self-attention and a feed-forward network, each after a LayerNorm, or before it.

    An adapter, which is a second feed-forward network with its LayerNorm, may follow them.
    """

    seeds = 1

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
        experts: ExpertsConfig | None = None,
        post_norm: bool = False,
        adapter: int | None = None,
        gated_bias: bool = False,
        rotary: Rotary | None = None,
        norm_bias: bool = True,
    ):
        super().__init__()
        self.dropout, self.post_norm = residual_dropout, post_norm
        self.norm_self_att = nn.LayerNorm(width, bias=norm_bias)
        sizes, dropout = (width, heads, width // heads), attention_dropout
        if gated_bias:
            self.self_attn = GatedBiasSelfAttention(*sizes, dropout=dropout)
        else:
            options: Any = {"bias": bias, "key_bias": key_bias, "dropout": dropout}
            self.self_attn = SelfAttention(*sizes, rotary=rotary, **options)
        self.norm_feed_forward = nn.LayerNorm(width, bias=norm_bias)
        self.feed_forward = build_feed_forward(
            width, feed_forward, experts, activation=activation, dropout=activation_dropout
        )
        self.norm_adapter = self.adapter = None
        if adapter is not None:
            self.norm_adapter = nn.LayerNorm(width)
            self.adapter = FeedForward(width, adapter, activation="relu")

    @classmethod
    def of(
        cls,
        config: Any,
        width: int,
        *,
        activation: Literal["relu", "gelu"],
        key_bias: bool = True,
        **more: Any,
    ) -> "TransformerLayer":
        """A layer with the remaining arguments from configuration fields of these names."""
        names = "heads", "feed_forward", "bias", *_DROPOUTS
        options = {name: getattr(config, name) for name in names}
        experts = getattr(config, "experts", None)
        options |= {"activation": activation, "key_bias": key_bias, "experts": experts, **more}
        return cls(width, **options)

    @property
    def dropouts(self) -> tuple[float, ...]:
        return self.dropout, self.feed_forward.dropout, self.self_attn.dropout

    @checkpointed_forward
    def forward(
        self,
        x: Tensor,
        layout: PackedLayout,
        groups: Groups | None = None,
        embeddings: Tensor | None = None,
        seeds: Sequence[Tensor] = (),
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Transform (T, width); a layer with a router also returns its losses."""
        residual = Residual.of(self, x, layout, self.dropout, seeds)
        attention, network = self.self_attn, self.feed_forward
        if self.post_norm:
            y = attention(x, layout, embeddings, residual=residual)
            y = x = residual.add_post_norm(x, y, attention.o_proj, self.norm_self_att, offset=0)
        else:
            y, x = residual.norm(x, self.norm_self_att)
            y = attention(y, layout, embeddings, residual=residual)
            y, x = residual.add_norm(x, y, attention.o_proj, self.norm_feed_forward, offset=0)
        y, losses = run_feed_forward(network, y, residual, offset=2, groups=groups)
        if self.post_norm:
            x = residual.add_post_norm(x, y, network.linear2, self.norm_feed_forward, offset=1)
        else:
            x = residual.add(x, y, network.linear2, offset=1)
        if self.adapter is not None:
            assert self.norm_adapter is not None
            x = x + self.adapter(normalized(x, self.norm_adapter))
        return x if losses is None else (x, losses)
