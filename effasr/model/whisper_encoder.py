"""Whisper's encoder over packed utterances."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr import ranges
from effasr.checks import check, check_dropouts, check_positive
from effasr.data.features.log_mel import MelFrames
from effasr.nn.positions import whisper_sinusoids
from effasr.nn.residual import normalized, residual_stream
from effasr.nn.stack import run_layers
from effasr.nn.transformer_layer import TransformerLayer
from effasr_kernels import PackedSequence

_KIND = "transformer"


@dataclass(frozen=True, kw_only=True, slots=True)
class WhisperEncoderConfig:
    """Whisper's encoder: two convolutions that halve the rate, then a pre-norm Transformer.

    It reads features of ``subsampling: 2``. The defaults are those of Whisper small.

    Attributes:
        kind: Distinguishes it from a FastConformer.
        width: Channels of the encoder frames; even, at least 4.
        layers: Transformer layers.
        heads: Attention heads; they divide the width.
        feed_forward: Channels inside a feed-forward network.
        bias: Whether the projections of attention have biases.
        key_bias: Whether the key projection has one; it has no effect, but some checkpoints have
            it.
        positions: Whisper's sinusoids, or a learned table that is initialized with them.
        max_frames: Most frames of an utterance, 20 ms each; longer ones are dropped in training and
            split in transcription.
        input_dropout: Dropout of the input of the first layer.
        residual_dropout: Dropout of the output of each module, before it is added.
        activation_dropout: Inside the feed-forward networks.
        attention_dropout: Dropout of attention weights.
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
        supported = self.positions in ("sinusoidal", "learned")
        check(supported, "positions", "be sinusoidal or learned", repr(self.positions))
        check_positive(self, "width", "layers", "heads", "feed_forward", "max_frames")
        check_dropouts(self)
        even = self.width % 2 == 0 and self.width >= 4
        check(even, "width", "be even and at least 4", self.width)
        rule = f"be a multiple of heads = {self.heads}"
        check(self.width % self.heads == 0, "width", rule, self.width)

    @property
    def subsampling(self) -> int:
        return 2


class ConvolutionStem(nn.Module):
    """Two convolutions of kernel size 3 in time, the second of stride 2, each before GELU.

    Zeros surround the real rows of each utterance before both. They are computed as matrix products
    over a row and its neighbours, which are gathered by shifts; the cost is small beside the
    layers.
    """

    def __init__(self, mel_bins: int, width: int):
        super().__init__()
        self.conv1 = nn.Conv1d(mel_bins, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)

    def forward(self, mel: MelFrames) -> Tensor:
        """Turn (2 T, mel_bins) into (T, width); rows of the tail are finite."""
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


class WhisperEncoder(nn.Module):
    def __init__(
        self, config: WhisperEncoderConfig, mel_bins: int, *, residual_in_fp32: bool = True
    ):
        super().__init__()
        self.config, self.residual_in_fp32 = config, residual_in_fp32
        self.stem = ConvolutionStem(mel_bins, config.width)
        learned = config.positions == "learned"
        self.embed_positions = nn.Embedding(config.max_frames, config.width) if learned else None
        self.layers = nn.ModuleList(
            TransformerLayer.of(config, config.width, activation="gelu", key_bias=config.key_bias)
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.embed_positions is not None:
            table = self.embed_positions.weight
            table.copy_(
                whisper_sinusoids(torch.arange(len(table), device=table.device), self.width)
            )

    @property
    def width(self) -> int:
        return self.config.width

    def places(self, positions: Tensor) -> Tensor:
        """Embed the positions of frames: int64 (R,) to (R, width)."""
        if self.embed_positions is None:
            return whisper_sinusoids(positions, self.width)
        # Past the last one there are only rows of no utterance.
        return self.embed_positions(positions.clamp(max=self.config.max_frames - 1))

    def forward(self, mel: MelFrames) -> PackedSequence:
        """Encode (2 T, mel_bins) into (T, width); rows of the tail are finite."""
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
        x = residual_stream(x, in_fp32=self.residual_in_fp32)
        x = run_layers(self.layers, "encoder", x, layout, layout)
        return PackedSequence(normalized(x, self.norm), layout)


def _product(rows: Tensor, conv: nn.Conv1d) -> Tensor:
    """A convolution of rows joined with their neighbours, (R, 3 C in) to (R, C out)."""
    # A linear layer for autocast; taps come before channels.
    return F.linear(rows, conv.weight.transpose(1, 2).flatten(1), conv.bias)
