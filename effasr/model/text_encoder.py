"""The text encoder: it reads a sentence to translate where the speech encoder would hear it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from effasr import ranges
from effasr.model.checks import check, check_positive, check_probabilities
from effasr.nn.positions import decoder_sinusoids
from effasr.nn.stack import is_empty, is_sharded, skip_layers
from effasr.nn.transformer_layer import TransformerLayer
from effasr_kernels import PackedSequence


@dataclass(frozen=True, kw_only=True, slots=True)
class TextEncoderConfig:
    """A pre-norm Transformer with ReLU and sinusoidal positions, as wide as the speech encoder.

    Attributes:
        layers: Transformer layers.
        heads: Of self-attention; they divide the width.
        feed_forward: Channels inside a feed-forward network.
        bias: Whether the projections of attention have biases.
        input_dropout: On the embedded tokens.
        residual_dropout: On the output of each module, before it is added.
        activation_dropout: Inside the feed-forward networks.
        attention_dropout: On attention weights.
    """

    layers: int = 6
    heads: int = 8
    feed_forward: int = 2048
    bias: bool = True
    input_dropout: float = 0.0
    residual_dropout: float = 0.0
    activation_dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "layers", "heads", "feed_forward")
        check_probabilities(
            self, "input_dropout", "residual_dropout", "activation_dropout", "attention_dropout"
        )

    def check_width(self, width: int) -> None:
        """Check that the layers can have the speech encoder's width.

        Raises:
            ValueError: They cannot.
        """
        divides = width % self.heads == 0
        check(divides, "text_encoder.heads", f"divide encoder.width = {width}", self.heads)
        check(width >= 4, "encoder.width", "be at least 4 with a `text_encoder`", width)


class TextEncoder(nn.Module):
    """From the tokens of sentences to what the decoder attends to."""

    def __init__(self, config: TextEncoderConfig, width: int, vocab_size: int):
        """Build the layers.

        Args:
            config: The architecture.
            width: Channels, those of the speech encoder.
            vocab_size: V, the tokenizer's.

        Raises:
            ValueError: The heads do not divide the width.
        """
        super().__init__()
        config.check_width(width)
        self.config, self.width = config, width
        self.embed_tokens = nn.Embedding(vocab_size, width)
        self.embedding_layernorm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            TransformerLayer(
                width,
                heads=config.heads,
                feed_forward=config.feed_forward,
                activation="relu",
                bias=config.bias,
                residual_dropout=config.residual_dropout,
                activation_dropout=config.activation_dropout,
                attention_dropout=config.attention_dropout,
            )
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the embedding with variance 1 / width."""
        nn.init.normal_(self.embed_tokens.weight, std=self.width**-0.5)

    def forward(self, tokens: PackedSequence, idle: Iterable[nn.Module] = ()) -> PackedSequence:
        """Encode int64 (T,) into (T, width); rows of the tail are finite, but mean nothing.

        Args:
            tokens: The sentences.
            idle: Layers to pass by first, those of the speech encoder.
        """
        layout = tokens.layout
        x = self.embed_tokens(tokens.values)
        x = x + decoder_sinusoids(layout.positions(), self.width).to(x.dtype)
        x = F.dropout(self.embedding_layernorm(x), self.config.input_dropout, self.training)
        x = skip_layers(idle, x)
        if is_empty(layout) and is_sharded(self.layers):
            return PackedSequence(self.norm(skip_layers(self.layers, x)), layout)
        for number, layer in enumerate(self.layers):
            with ranges.range(f"text_encoder.{number}"):
                x = layer(x, layout)
        return PackedSequence(self.norm(x), layout)
