"""Whisper's encoder over packed utterances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr import ranges
from effasr.data.features.log_mel import MelFrames
from effasr.model.checks import check, check_positive, check_probabilities
from effasr.nn.positions import whisper_sinusoids
from effasr.nn.stack import is_empty, is_sharded, pass_by
from effasr.nn.transformer_layer import TransformerLayer
from effasr_kernels import PackedSequence

_KIND = "transformer"


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerEncoderConfig:
    """A pre-norm Transformer with GELU behind two convolutions that halve the rate, as Whisper's.

    It reads features of ``subsampling: 2``. The defaults are those of Whisper small.

    Attributes:
        kind: Tells it from a FastConformer.
        width: Channels of the encoder frames; even, at least 4.
        layers: Transformer layers.
        heads: Of self-attention; they divide the width.
        feed_forward: Channels inside a feed-forward network.
        bias: Whether the projections of attention have biases.
        key_bias: Whether that of the keys has; in vain, but for a checkpoint that has it.
        positions: How a frame knows its place: by Whisper's sinusoids, or by a table that is
            learnt, which begins with these.
        max_frames: The most frames that an utterance may have, 20 ms each; longer ones are left
            out of training, and cut in transcription.
        input_dropout: On the input of the first layer.
        residual_dropout: On the output of each module, before it is added.
        activation_dropout: Inside the feed-forward networks.
        attention_dropout: On attention weights.
    """

    kind: Literal["transformer"] = _KIND
    width: int = 768
    layers: int = 12
    heads: int = 12
    feed_forward: int = 3072
    bias: bool = True
    key_bias: bool = False
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    max_frames: int = 1500
    input_dropout: float = 0.0
    residual_dropout: float = 0.0
    activation_dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        check(self.kind == _KIND, "kind", f"be {_KIND}", repr(self.kind))
        known = self.positions in ("sinusoidal", "learned")
        check(known, "positions", "be sinusoidal or learned", repr(self.positions))
        check_positive(self, "width", "layers", "heads", "feed_forward", "max_frames")
        check_probabilities(
            self, "input_dropout", "residual_dropout", "activation_dropout", "attention_dropout"
        )
        even = self.width % 2 == 0 and self.width >= 4
        check(even, "width", "be even and at least 4", self.width)
        rule = f"be a multiple of heads = {self.heads}"
        check(self.width % self.heads == 0, "width", rule, self.width)

    @property
    def subsampling(self) -> int:
        """Mel rows of an encoder frame."""
        return 2


class ConvolutionStem(nn.Module):
    """Two convolutions of three taps in time, the second of stride 2, each before GELU.

    Beyond the real rows of each utterance lie zeros, before each of them. They are matrix products
    over a row and its neighbours, which are gathered by shifts: little beside the layers.
    """

    def __init__(self, mel_bins: int, width: int):
        """Build the convolutions.

        Args:
            mel_bins: Bands of the features.
            width: Channels of both.
        """
        super().__init__()
        self.conv1 = nn.Conv1d(mel_bins, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)

    def forward(self, mel: MelFrames) -> Tensor:
        """Turn (2 T, mel_bins) into (T, width); the tail's rows are finite."""
        rows = mel.values.to(self.conv1.weight.dtype)
        inside = mel.row_positions[:, None] > 0
        before = F.pad(rows, (0, 0, 1, 0))[:-1] * inside
        # The row behind the last one of an utterance is the first of another, or in the tail.
        after = F.pad(rows * inside, (0, 0, 0, 1))[1:]
        x = F.gelu(_product(torch.cat([before, rows, after], 1), self.conv1))
        x = x * mel.mask[:, None]
        first, second = x.unflatten(0, (-1, 2)).unbind(1)
        earlier = F.pad(second, (0, 0, 1, 0))[:-1] * (mel.slot_positions[:, None] > 0)
        return F.gelu(_product(torch.cat([earlier, first, second], 1), self.conv2))


class TransformerEncoder(nn.Module):
    """From mel rows to encoder frames: the encoder of ``WhisperForConditionalGeneration``."""

    def __init__(self, config: TransformerEncoderConfig, mel_bins: int):
        """Build the layers.

        Args:
            config: The architecture.
            mel_bins: Bands of the features.
        """
        super().__init__()
        self.config = config
        self.stem = ConvolutionStem(mel_bins, config.width)
        learned = config.positions == "learned"
        self.embed_positions = nn.Embedding(config.max_frames, config.width) if learned else None
        self.layers = nn.ModuleList(_layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Let places that are learnt begin with the sinusoids."""
        if self.embed_positions is not None:
            table = self.embed_positions.weight
            table.copy_(
                whisper_sinusoids(torch.arange(len(table), device=table.device), self.width)
            )

    @property
    def width(self) -> int:
        """Channels of the encoder frames."""
        return self.config.width

    def places(self, positions: Tensor) -> Tensor:
        """Embed the places of frames: int64 (R,) to (R, width)."""
        if self.embed_positions is None:
            return whisper_sinusoids(positions, self.width)
        # Past the last one there are only rows of no utterance.
        return self.embed_positions(positions.clamp(max=self.config.max_frames - 1))

    def forward(self, mel: MelFrames) -> PackedSequence:
        """Encode (2 T, mel_bins) into (T, width); rows of the tail are finite, but mean nothing.

        Raises:
            ValueError: An utterance is longer than ``config.max_frames``.
        """
        layout, config = mel.layout, self.config
        if layout.max_seqlen_bound > config.max_frames:
            raise ValueError(
                f"`max_frames` must be at least the {layout.max_seqlen_bound} frames of the "
                f"longest utterance, but is {config.max_frames}: cut the utterance, or raise "
                "`model.encoder.max_frames` for a model that has learnt longer ones."
            )
        with ranges.range("subsampling"):
            x = self.stem(mel)
        x = x + self.places(mel.slot_positions).to(x.dtype)
        x = F.dropout(x, config.input_dropout, self.training)
        if is_empty(layout) and is_sharded(self.layers):
            return PackedSequence(self.norm(pass_by(self.layers, x)), layout)
        for number, layer in enumerate(self.layers):
            with ranges.range(f"encoder.{number}"):
                x = layer(x, layout)
        return PackedSequence(self.norm(x), layout)


def _layer(config: TransformerEncoderConfig) -> TransformerLayer:
    return TransformerLayer(
        config.width,
        heads=config.heads,
        feed_forward=config.feed_forward,
        activation="gelu",
        bias=config.bias,
        key_bias=config.key_bias,
        residual_dropout=config.residual_dropout,
        activation_dropout=config.activation_dropout,
        attention_dropout=config.attention_dropout,
    )


def _product(rows: Tensor, conv: nn.Conv1d) -> Tensor:
    """A convolution of rows beside their neighbours, (R, 3 C in) to (R, C out)."""
    # A linear layer, which autocast knows as such; taps come before channels.
    return F.linear(rows, conv.weight.transpose(1, 2).flatten(1), conv.bias)
