"""A layer of the Transformer decoder, and the decoder's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from effasr.model.checks import check, check_positive, check_probabilities
from effasr.nn.attention import CrossAttention, SelfAttention
from effasr.nn.cache.decoder_state import DecoderState, KeysValues
from effasr.nn.experts.config import ExpertsConfig
from effasr.nn.experts.feed_forward import build_feed_forward, run_feed_forward
from effasr.nn.experts.grouping import Groups
from effasr.nn.residual import Residual
from effasr.nn.stack import Layer, checkpointed_forward
from effasr_kernels import PackedLayout, PackedSequence

_MOST_BARRED = 15
"""Greedy search looks at one token more than may be suppressed, of 16 at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A pre-norm Transformer decoder; by default with ReLU and sinusoidal positions, as Canary's.

    Attributes:
        width: Channels; even, at least 4.
        layers: Decoder layers.
        heads: Heads of self- and cross-attention.
        head_dim: Channels of a head; by default ``width / heads``.
        feed_forward: Channels inside a feed-forward network.
        max_positions: Most tokens of a sequence, the prompt included.
        positions: Canary's sinusoids, or a learned embedding, as Whisper's.
        activation: Activation of the feed-forward networks; GELU is the exact one.
        embedding_norm: Whether a LayerNorm follows the embedding.
        bias: Whether the projections of attention have biases.
        key_bias: Whether the key projection has one, too.
        tie_embeddings: Whether the output layer shares the weights of the token embedding.
        output_bias: Whether the output layer has a bias.
        suppress: Tokens that are never decoded, such as Whisper's for noises.
        begin_suppress: Tokens that no transcript begins with.
        alignment_heads: Layer and head of each cross-attention that transformers finds the times of
            words by; of a Whisper, for its export.
        max_initial_timestamp: Largest number of the first timestamp in transformers' generation
            with timestamps, null for no limit; of a Whisper, for its export.
        input_dropout: Dropout of the embedded tokens.
        residual_dropout: Dropout of the output of each module, before it is added.
        activation_dropout: Inside the feed-forward networks.
        attention_dropout: Dropout of attention weights.
        experts: Experts of the feed-forward networks; null for none.
    """

    width: int = 1024
    layers: int = 4
    heads: int = 8
    head_dim: int | None = None
    feed_forward: int = 4096
    max_positions: int = 1024
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    activation: Literal["relu", "gelu"] = "relu"
    embedding_norm: bool = True
    bias: bool = True
    key_bias: bool = True
    tie_embeddings: bool = True
    output_bias: bool = True
    suppress: tuple[int, ...] = ()
    begin_suppress: tuple[int, ...] = ()
    alignment_heads: tuple[tuple[int, int], ...] = ()
    max_initial_timestamp: int | None = None
    input_dropout: float = 0.0
    residual_dropout: float = 0.0
    activation_dropout: float = 0.0
    attention_dropout: float = 0.0
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        check_positive(self, "width", "layers", "heads", "feed_forward", "max_positions")
        check_probabilities(
            self, "input_dropout", "residual_dropout", "activation_dropout", "attention_dropout"
        )
        for name, choices in (
            ("positions", ("sinusoidal", "learned")),
            ("activation", ("relu", "gelu")),
        ):
            value = getattr(self, name)
            check(value in choices, name, f"be one of {', '.join(choices)}", repr(value))
        for name in ("suppress", "begin_suppress"):
            least = min(getattr(self, name), default=0)
            check(least >= 0, name, "be token ids, at least 0", least)
        rule = f"be below layers = {self.layers} and heads = {self.heads}"
        for layer, head in self.alignment_heads:
            inside = 0 <= layer < self.layers and 0 <= head < self.heads
            check(inside, "alignment_heads", rule, [layer, head], "or leave them out")
        most = len(self.begin_suppress)
        check(most <= _MOST_BARRED, "begin_suppress", f"be at most {_MOST_BARRED} tokens", most)
        even = self.width % 2 == 0 and self.width >= 4
        check(even, "width", "be even and at least 4", self.width)
        if self.head_dim is None:
            rule = f"be a multiple of heads = {self.heads}"
            check(self.width % self.heads == 0, "width", rule, self.width, "or set `head_dim`")
        else:
            check_positive(self, "head_dim")

    @property
    def head_width(self) -> int:
        """Channels of a head."""
        return self.width // self.heads if self.head_dim is None else self.head_dim


class DecoderLayer(Layer):
    """Causal self-attention, cross-attention and a feed-forward network, each after a LayerNorm."""

    seeds = 2

    def __init__(self, config: DecoderConfig):
        super().__init__()
        sizes = config.width, config.heads, config.head_width
        attention = {
            "bias": config.bias,
            "key_bias": config.key_bias,
            "dropout": config.attention_dropout,
        }
        self.dropout = config.residual_dropout
        self.input_layernorm = nn.LayerNorm(config.width)
        self.self_attn = SelfAttention(*sizes, causal=True, **attention)
        self.post_attention_layernorm = nn.LayerNorm(config.width)
        self.encoder_attn = CrossAttention(*sizes, **attention)
        self.final_layernorm = nn.LayerNorm(config.width)
        self.mlp = build_feed_forward(
            config.width,
            config.feed_forward,
            config.experts,
            activation=config.activation,
            dropout=config.activation_dropout,
        )

    @property
    def dropouts(self) -> tuple[float, ...]:
        """Of outputs of modules, of the feed-forward network, and of attention."""
        return self.dropout, self.mlp.dropout, self.self_attn.dropout

    @checkpointed_forward
    def forward(
        self,
        x: Tensor,
        layout: PackedLayout,
        encoded: PackedSequence,
        sigma: float | None,
        groups: Groups | None = None,
        seeds: Sequence[Tensor] = (),
    ) -> tuple[Tensor | None, ...]:
        """Transform (U, width); also return the penalty of guided attention, (U,) or None.

        A layer with a router returns its losses as a third result.
        """
        own, cross = self.self_attn, self.encoder_attn
        residual = Residual.of(self, x, layout, self.dropout, seeds)
        y, x = residual.norm(x, self.input_layernorm)
        y = own(y, layout, residual=residual)
        y, x = residual.add_norm(x, y, own.o_proj, self.post_attention_layernorm, offset=0)
        y, penalty = cross(
            *(y, layout, encoded.values, encoded.layout),
            sigma=sigma,
            # With the same one it would drop what self-attention drops.
            seed=seeds[1] if seeds else None,
            residual=residual,
        )
        y, x = residual.add_norm(x, y, cross.o_proj, self.final_layernorm, offset=1)
        y, losses = run_feed_forward(self.mlp, y, residual, offset=3, groups=groups)
        x = residual.add(x, y, self.mlp.linear2, offset=2)
        return (x, penalty) if losses is None else (x, penalty, losses)

    def read(
        self,
        x: Tensor,
        layout: PackedLayout,
        speech: KeysValues,
        layout_speech: PackedLayout,
        groups: Groups | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Transform the first rows of sequences as `forward`, in inference."""
        # x: (U, width) -> (U, width), and keys and values of the rows, for `step`
        y, own = self.self_attn.read(self.input_layernorm(x), layout)
        x = x + y
        normed = self.post_attention_layernorm(x)
        x = x + self.encoder_attn.read(normed, layout, speech, layout_speech)
        return self._after_network(x, groups), own

    def step(
        self, x: Tensor, state: DecoderState, number: int, groups: Groups | None = None
    ) -> Tensor:
        """Transform the next row of each sequence in this layer: (N, width) to (N, width).

        ``groups`` are the experts of the rows, where names choose them.
        """
        x = x + self.self_attn.step(self.input_layernorm(x), state.self_cache, number)
        normed = self.post_attention_layernorm(x)
        if number == state.watched:
            state.weights = self.encoder_attn.weights(normed, *state.speech(number))
        x = x + self.encoder_attn.step(normed, state.cross_cache, number)
        return self._after_network(x, groups)

    def _after_network(self, x: Tensor, groups: Groups | None) -> Tensor:
        """Add the output of the feed-forward network, in inference."""
        y = self.final_layernorm(x)
        return x + (self.mlp(y) if groups is None else self.mlp(y, groups=groups))
