"""The encoder of wav2vec 2.0 and its kin over packed utterances."""

import math
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr import ranges
from effasr.checks import check, check_choices, check_dropouts, check_positive
from effasr.data.features.log_mel import MelFrames
from effasr.data.features.samples import SampleFrames
from effasr.data.features.segments import segment_sum
from effasr.data.features.spec_augment import SpecAugmentConfig, spec_augment
from effasr.nn.attention import GatedBiasSelfAttention
from effasr.nn.parameters import touch_unused_parameters
from effasr.nn.residual import normalized, residual_stream
from effasr.nn.stack import run_layers
from effasr.nn.transformer_layer import TransformerLayer
from effasr_kernels import PackedLayout, PackedSequence, Rotary

KERNELS, STRIDES = (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)
"""Of the convolutions, in samples of what each reads: 400 samples make a frame, each 320."""

_MOONSHINE = (127, 7, 3), (64, 3, 2)
"""Those of a Moonshine: 895 samples make a frame, each 384."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wav2Vec2EncoderConfig:
    """Seven convolutions over the waveform, a convolution for positions, and a Transformer.

    It reads features of kind waveform. The defaults are those of wav2vec2-base; MMS, XLS-R and
    wav2vec2-large have ``convolution_norm: layer`` and ``pre_norm: true``. SpecAugment
    (``model.spec_augment``) hides frames and channels of what the convolutions make.

    Attributes:
        kind: Distinguishes it from the other encoders.
        family: The classes of transformers that it is read from and written as. omniasr_ctc has
            zeros in place of the frames that SpecAugment hides, the others a learned embedding;
            wavlm adds a bias of the distance to the scores of attention, times a gate of the query.
            moonshine has three convolutions over the waveform, no projection after them, rotary
            embedding instead of a convolution, and no biases in attention and norms; ``pre_norm``.
        width: Channels of the encoder frames.
        layers: Transformer layers.
        heads: Attention heads; they divide the width.
        feed_forward: Channels inside a feed-forward network.
        channels: Channels of the convolutions over the waveform.
        convolution_norm: ``group`` normalizes the first convolution, each channel over the
            utterance; ``layer`` each convolution, over the channels of a row.
        convolution_bias: Whether these convolutions have biases.
        position_kernel: Frames that the convolution for positions reads, even.
        position_groups: Groups of its channels; they divide the width.
        pre_norm: Whether the norms precede the modules of a layer, or follow them.
        distance_buckets: Numbers of a wavlm's bias; half of them for later frames, and half of
            these for distances one by one.
        longest_distance: From this distance on, a wavlm's bias is the same.
        rotary_fraction: Fraction of the channels of a moonshine's head that rotate.
        adapter: Channels of the adapter in each layer, such as MMS has for a language; null for
            none.
        input_dropout: Dropout of the input of the first layer.
        residual_dropout: Dropout of the output of each module, before it is added.
        activation_dropout: Inside the feed-forward networks.
        attention_dropout: Dropout of attention weights.
    """

    kind: Literal["wav2vec2"] = "wav2vec2"
    family: Literal["wav2vec2", "hubert", "omniasr_ctc", "wavlm", "moonshine"] = "wav2vec2"
    width: int = 768
    layers: int = 12
    heads: int = 12
    feed_forward: int = 3072
    channels: int = 512
    convolution_norm: Literal["group", "layer"] = "group"
    convolution_bias: bool = False
    position_kernel: int = 128
    position_groups: int = 16
    pre_norm: bool = False
    distance_buckets: int = 320
    longest_distance: int = 800
    rotary_fraction: float = 0.9
    adapter: int | None = None
    input_dropout: float = 0.0
    residual_dropout: float = 0.0
    activation_dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_choices(
            self,
            kind=("wav2vec2",),
            family=("wav2vec2", "hubert", "omniasr_ctc", "wavlm", "moonshine"),
            convolution_norm=("group", "layer"),
        )
        check_positive(self, "width", "layers", "heads", "feed_forward", "channels")
        check_positive(self, "position_kernel", "position_groups")
        buckets, longest = self.distance_buckets, self.longest_distance
        check(buckets >= 4 and buckets % 4 == 0, "distance_buckets", "be a multiple of 4", buckets)
        rule = f"be greater than distance_buckets / 4 = {buckets // 4}"
        check(longest > buckets // 4, "longest_distance", rule, longest)
        check_dropouts(self)
        usual = self.pre_norm or self.family != "moonshine"
        check(usual, "pre_norm", "be true for the family moonshine", "false")
        kernel = self.position_kernel
        check(kernel % 2 == 0, "position_kernel", "be even", kernel)
        rule = f"be a multiple of heads = {self.heads} and position_groups = {self.position_groups}"
        divided = self.width % self.heads == self.width % self.position_groups == 0
        check(divided, "width", rule, self.width)
        if self.adapter is not None:
            check(self.adapter >= 1, "adapter", "be at least 1 or null", self.adapter)
            check(self.pre_norm, "adapter", "be null without `pre_norm`", self.adapter)

    @property
    def subsampling(self) -> int:
        return 1

    @property
    def max_frames(self) -> None:
        """None: its positions have no end."""

    @property
    def bias(self) -> bool:
        return self.family != "moonshine"

    @property
    def convolutions(self) -> list[tuple[int, int, int, int]]:
        """Inputs, channels, kernel size and stride of each convolution over the waveform."""
        width, channels = self.width, [1, *[self.channels] * len(KERNELS)]
        kernels, strides = KERNELS, STRIDES
        if self.family == "moonshine":
            channels, (kernels, strides) = [1, width, 2 * width, width], _MOONSHINE
        return list(zip(channels, channels[1:], kernels, strides, strict=False))

    @property
    def hop(self) -> int:
        """Samples between two frames."""
        return math.prod(stride for *_, stride in self.convolutions)


class SampleConvolution(nn.Module):
    """A convolution over time without padding, a norm, and GELU, with channels last.

    A norm of the whole ``utterance``, as a Moonshine's, follows a hyperbolic tangent instead.
    """

    def __init__(
        self, inputs: int, channels: int, kernel: int, stride: int, norm: str | None, *, bias: bool
    ):
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv1d(inputs, channels, kernel, stride=stride, bias=bias)
        # Its parameters alone are used where the mean is that of an utterance.
        self.norm = None if norm is None else nn.LayerNorm(channels)
        self.is_grouped, self.is_whole = norm == "group", norm == "utterance"

    def forward(self, x: Tensor, frames: SampleFrames) -> Tensor:
        """Convolve (R, C in) to (R / stride, C out); rows that read another utterance are unused.

        Every utterance begins at a multiple of all strides, so one product serves all.
        """
        weight, size = self.conv.weight, self.stride * x.shape[1]
        blocks, more = x.reshape(-1, size), weight.shape[2] * x.shape[1] - size
        parts = [blocks]
        while more > 0:
            later = len(parts)
            parts.append(F.pad(blocks[later:, :more], (0, 0, 0, later))[: len(blocks)])
            more -= size
        # Taps come before channels; a linear layer for autocast.
        blocks = torch.cat(parts, 1) if len(parts) > 1 else blocks
        y = F.linear(blocks, weight.transpose(1, 2).flatten(1), self.conv.bias)
        if self.norm is not None and self.is_whole:
            return self._over_time(y.tanh(), self.norm, frames)
        if self.norm is not None:
            y = self._over_time(y, self.norm, frames) if self.is_grouped else self.norm(y)
        return F.gelu(y)

    def _over_time(self, y: Tensor, norm: nn.LayerNorm, frames: SampleFrames) -> Tensor:
        """Normalize over the rows of an utterance, also those that no frame reads."""
        slots = frames.slots
        ids, rows = slots.sequence_ids(), y.float().unflatten(0, (slots.rows, -1))
        reach = self.conv.kernel_size[0]
        lengths = (frames.lengths - reach).div(self.stride, rounding_mode="floor") + 1
        count = lengths.clamp(min=1)[:, None]
        step = torch.arange(rows.shape[1], device=y.device)
        position = slots.positions()[:, None] * rows.shape[1] + step
        real = (position < F.pad(lengths, (0, 1))[ids][:, None])[..., None]

        def mean(values: Tensor) -> Tensor:
            total = segment_sum((values * real).sum(1), slots) / count
            if self.is_whole:
                total = total.mean(1, keepdim=True)
            return F.pad(total, (0, 0, 0, 1))[ids][:, None]

        centred = rows - mean(rows)
        scale = (mean(centred.square()) + norm.eps).rsqrt()
        return (centred * scale * norm.weight + norm.bias).flatten(0, 1).to(y.dtype)


class SampleStem(nn.Module):
    """The convolutions over the waveform, and the projection of their channels."""

    def __init__(self, config: Wav2Vec2EncoderConfig):
        super().__init__()
        later = None if config.convolution_norm == "group" else "layer"
        norms = [config.convolution_norm, *[later] * (len(KERNELS) - 1)]
        biases = [config.convolution_bias] * len(KERNELS)
        is_moonshine = config.family == "moonshine"
        if is_moonshine:
            norms, biases = ["utterance", None, None], [False, True, True]
        self.convolutions = nn.ModuleList(
            SampleConvolution(*sizes, norm, bias=bias)
            for sizes, norm, bias in zip(config.convolutions, norms, biases, strict=True)
        )
        channels = config.channels
        self.norm = nn.Identity() if is_moonshine else nn.LayerNorm(channels)
        self.projection = nn.Identity() if is_moonshine else nn.Linear(channels, config.width)

    def forward(self, frames: SampleFrames) -> Tensor:
        """Turn samples into (T, width); rows of the tail are finite."""
        x = frames.values.reshape(-1, 1).to(next(self.parameters()).dtype)
        for convolution in self.convolutions:
            x = convolution(x, frames)
        x = x.index_select(0, _places(frames.layout, frames.spare))
        return self.projection(self.norm(x))


class PositionConvolution(nn.Module):
    """A convolution of groups of channels over the frames around each frame, before GELU."""

    def __init__(self, width: int, kernel: int, groups: int):
        super().__init__()
        self.conv = nn.Conv1d(width, width, kernel, groups=groups)
        self.gap = kernel // 2

    def forward(self, x: Tensor, layout: PackedLayout) -> Tensor:
        """Transform (T, width), with zeros beyond the ends of each utterance."""
        places = _places(layout, self.gap)
        size = layout.rows + (layout.num_sequences + 2) * self.gap
        # The zeros between two utterances are as many as a frame reads to one side.
        spread = x.new_zeros(size, x.shape[1]).index_copy(0, places + self.gap, x)
        y = self.conv(spread.T[None])[0].T
        return F.gelu(y.index_select(0, places))


class Wav2Vec2Encoder(nn.Module):
    """transformers' ``Wav2Vec2Model`` and its kin, of each utterance alone."""

    def __init__(
        self,
        config: Wav2Vec2EncoderConfig,
        masking: SpecAugmentConfig | None = None,
        *,
        residual_in_fp32: bool = True,
    ):
        super().__init__()
        self.config, self.residual_in_fp32 = config, residual_in_fp32
        self.masking = SpecAugmentConfig() if masking is None else masking
        width = config.width
        self.stem = SampleStem(config)
        self.mask_embedding = None
        if config.family not in ("omniasr_ctc", "moonshine"):
            self.mask_embedding = nn.Parameter(torch.empty(width))
        is_moonshine = config.family == "moonshine"
        rotary = Rotary(fraction=config.rotary_fraction) if is_moonshine else None
        sizes = width, config.position_kernel, config.position_groups
        self.positions = None if is_moonshine else PositionConvolution(*sizes)
        self.input_norm = None if config.pre_norm else nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            TransformerLayer.of(
                config,
                width,
                activation="gelu",
                post_norm=not config.pre_norm,
                adapter=config.adapter,
                gated_bias=config.family == "wavlm",
                rotary=rotary,
                norm_bias=config.bias,
            )
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(width, bias=config.bias) if config.pre_norm else None
        self.distances = None
        if config.family == "wavlm":
            self.distances = nn.Embedding(config.distance_buckets, config.heads)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.mask_embedding is not None:
            nn.init.uniform_(self.mask_embedding)
        if self.distances is not None:
            nn.init.normal_(self.distances.weight)

    def forward(self, frames: SampleFrames) -> PackedSequence:
        """Encode samples into (T, width); rows of the tail are finite."""
        layout, config = frames.layout, self.config
        with ranges.range("subsampling"):
            x = self.stem(frames)
        if self.training:
            x = self._masked(x, layout)
        if self.positions is not None:
            x = x + self.positions(x, layout)
        if self.input_norm is not None:
            x = normalized(x, self.input_norm)
        x = F.dropout(x, config.input_dropout, self.training)
        x = residual_stream(x, in_fp32=self.residual_in_fp32)
        x = run_layers(self.layers, "encoder", x, layout, layout, None, self._table(layout))
        return PackedSequence(x if self.norm is None else normalized(x, self.norm), layout)

    def _table(self, layout: PackedLayout) -> Tensor | None:
        """Give the bias of each distance to a wavlm's attention."""
        if self.distances is None:
            return None
        reach = max(layout.max_seqlen_bound, 1)
        # Of a query minus its key, in the order of the table.
        distance = torch.arange(1 - reach, reach, device=layout.device)
        config = self.config
        buckets = _buckets(-distance, config.distance_buckets, config.longest_distance)
        attention = cast(GatedBiasSelfAttention, cast(TransformerLayer, self.layers[0]).self_attn)
        return attention.table(self.distances(buckets))

    def _masked(self, x: Tensor, layout: PackedLayout) -> Tensor:
        """Put the mask embedding in place of some frames, and zeros in place of some channels."""
        hidden = self.mask_embedding
        lengths = layout.cu_seqlens.long().diff()
        shown = MelFrames(torch.ones_like(x, dtype=torch.float32), layout, lengths, 1)
        if self.masking.freq_masks:
            x = x * spec_augment(shown, replace(self.masking, time_masks=0)).to(x.dtype)
        if not self.masking.time_masks:
            # The processes of a group wait for its gradient.
            return x if hidden is None else touch_unused_parameters(x, [hidden])
        shown = shown.with_values(shown.values[:, :1])
        visible = spec_augment(shown, replace(self.masking, freq_masks=0)) > 0
        return torch.where(visible, x, 0.0 if hidden is None else hidden.to(x.dtype))


def _buckets(distance: Tensor, count: int, longest: int) -> Tensor:
    """Number distances as T5 does: one by one, then in steps that grow up to the longest."""
    half, single = count // 2, count // 4
    size = distance.abs()
    steps = torch.log(size.clamp(min=1).float() / single) / math.log(longest / single)
    far = (single + steps * (half - single)).long().clamp(max=half - 1)
    return (distance > 0) * half + torch.where(size < single, size, far)


def _places(layout: PackedLayout, spare: int) -> Tensor:
    """Where each row is if so many rows follow every utterance: int64 (T,)."""
    rows = torch.arange(layout.rows, device=layout.device)
    return rows + spare * layout.sequence_ids()
