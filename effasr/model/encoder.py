"""The FastConformer encoder over packed utterances."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr import ranges
from effasr.checks import check, check_choices, check_dropouts, check_positive
from effasr.data.features.log_mel import MelFrames
from effasr.nn.attention import RelativeSelfAttention, SelfAttention
from effasr.nn.convolution import ConformerConvolution
from effasr.nn.experts import (
    ExpertFeedForward,
    ExpertsConfig,
    Groups,
    add_losses,
    build_feed_forward,
    named_groups,
    run_feed_forward,
)
from effasr.nn.feed_forward import FeedForward
from effasr.nn.positions import PositionTables, relative_sinusoids
from effasr.nn.residual import Residual, residual_stream
from effasr.nn.stack import Layer, checkpointed_forward, run_layers
from effasr.nn.subsampling import ConvSubsampling
from effasr_kernels import Context, PackedLayout, PackedSequence, Rotary

_REACH_STEP = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class FastConformerConfig:
    """A FastConformer: subsampling, then Conformer layers.

    Attributes:
        kind: Distinguishes it from the other encoders: see `effasr.model.whisper_encoder`.
        width: Channels of the encoder frames; even.
        layers: Conformer layers.
        heads: Attention heads; they divide the width.
        feed_forward: Channels inside a feed-forward network.
        conv_kernel: Kernel size of the depthwise convolution, odd.
        subsampling: Mel rows of an encoder frame, 4 or 8: with a hop of 10 ms, frames of 40 or
            80 ms. CTC needs more frames than tokens, so that 4 suits small vocabularies and fast
            speech; it costs about twice the time and memory of 8, and more in attention.
        subsampling_channels: Channels of the subsampling convolutions.
        position: Relative positions as in Transformer-XL and published models, rotary embedding
            (RoPE), or none.
        conv_norm: Norm in the convolution module.
        subsampling_norm: LayerNorm after subsampling, which helps small models to start.
        input_positions: Scale of sinusoidal positions that are added to the encoder's input; 0 for
            none. Small models align sooner with 0.3.
        scale_input: Multiply the input by the square root of the width.
        bias: Whether linear layers of attention and feed-forward have biases.
        convolution_bias: Whether layers of the convolution module have biases.
        input_dropout: Dropout of the input of the first layer.
        residual_dropout: Dropout of the output of each module, before it is added.
        activation_dropout: Inside the feed-forward networks.
        attention_dropout: Dropout of attention weights.
        position_dropout: Dropout of the embeddings of relative positions.
        context: Contexts of self-attention, in encoder frames; none for whole utterances. With
            several, each training step draws one, so that one model serves several delays;
            evaluation takes the first. To decode a stream frame by frame, a context is limited to
            the left, and ``right`` is 0: the delay is then that of a chunk.
        causal_convolution: Whether the depthwise convolution reads no later frames, as streaming
            needs.
        causal_subsampling: Whether frame f reads the mel rows up to s f, as NeMo's streaming models
            do, instead of those up to s f + s - 1. A stream needs neither: both wait for the rows
            of a chunk. There is one frame more, and one band more.
        max_frames: Fixed reach of the table of relative positions, for a static shape; by default
            the longest utterance of the batch, rounded up.
        experts: Experts of the feed-forward networks; null for none.
    """

    kind: Literal["fastconformer"] = "fastconformer"
    width: int = 512
    layers: int = 17
    heads: int = 8
    feed_forward: int = 2048
    conv_kernel: int = 9
    subsampling: int = 8
    subsampling_channels: int = 256
    position: Literal["relative", "rotary", "none"] = "relative"
    conv_norm: Literal["batch_norm", "layer_norm"] = "batch_norm"
    subsampling_norm: bool = False
    input_positions: float = 0.0
    scale_input: bool = False
    bias: bool = True
    convolution_bias: bool = True
    input_dropout: float = 0.0
    residual_dropout: float = 0.0
    activation_dropout: float = 0.0
    attention_dropout: float = 0.0
    position_dropout: float = 0.0
    context: tuple[Context, ...] = ()
    causal_convolution: bool = False
    causal_subsampling: bool = False
    max_frames: int | None = None
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        check(self.kind == "fastconformer", "kind", "be fastconformer", repr(self.kind))
        check_positive(
            self, "width", "layers", "heads", "feed_forward", "conv_kernel", "subsampling_channels"
        )
        check_dropouts(self)
        rule = f"be a multiple of 2 and of heads = {self.heads}"
        check(self.width % 2 == self.width % self.heads == 0, "width", rule, self.width)
        check(
            self.subsampling in (4, 8),
            "subsampling",
            "be 4 or 8",
            self.subsampling,
            "8 gives frames of 80 ms, 4 of 40 ms",
        )
        check(self.conv_kernel % 2 == 1, "conv_kernel", "be odd", self.conv_kernel)
        check_choices(
            self, position=("relative", "rotary", "none"), conv_norm=("batch_norm", "layer_norm")
        )
        positions = self.input_positions
        check(positions >= 0, "input_positions", "be at least 0", positions)
        if self.max_frames is not None:
            check(self.max_frames >= 1, "max_frames", "be at least 1 or null", self.max_frames)


@dataclass(frozen=True, slots=True)
class _Context:
    """Inputs that all layers share in one forward."""

    layout: PackedLayout  # The sequences, T rows
    embeddings: Tensor | None
    seen: Context | None  # The frames that a frame attends to; None for all of its utterance
    groups: Groups | None = None  # The experts of the frames, where names choose them


class ConformerLayer(Layer):
    """Half a feed-forward network, self-attention, convolution, the other half, LayerNorm."""

    seeds = 1

    def __init__(self, config: FastConformerConfig):
        super().__init__()
        width = config.width
        self.dropout = config.residual_dropout
        self.norm_feed_forward1 = nn.LayerNorm(width)
        self.feed_forward1 = _feed_forward(config)
        self.norm_self_att = nn.LayerNorm(width)
        self.self_attn = _self_attention(config)
        self.norm_conv = nn.LayerNorm(width)
        self.conv = ConformerConvolution(
            width,
            config.conv_kernel,
            norm=config.conv_norm,
            bias=config.convolution_bias,
            causal=config.causal_convolution,
        )
        self.norm_feed_forward2 = nn.LayerNorm(width)
        self.feed_forward2 = _feed_forward(config)
        self.norm_out = nn.LayerNorm(width)

    @property
    def dropouts(self) -> tuple[float, ...]:
        return self.dropout, self.feed_forward1.dropout, self.self_attn.dropout

    @checkpointed_forward
    def forward(
        self, x: Tensor, context: _Context, seeds: Sequence[Tensor] = ()
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Transform (T, width); a layer with routers also returns their losses."""
        layout, groups = context.layout, context.groups
        first, second = self.feed_forward1, self.feed_forward2
        residual = Residual.of(self, x, layout, self.dropout, seeds)
        y, x = residual.norm(x, self.norm_feed_forward1)
        y, losses = run_feed_forward(first, y, residual, offset=4, groups=groups)
        y, x = residual.add_norm(x, y, first.linear2, self.norm_self_att, offset=0, scale=0.5)
        y = self.self_attn(y, layout, context.embeddings, context.seen, residual=residual)
        y, x = residual.add_norm(x, y, self.self_attn.o_proj, self.norm_conv, offset=1)
        y = self.conv(y, layout, residual)
        y, x = residual.add_norm(x, y, self.conv.pointwise2, self.norm_feed_forward2, offset=2)
        y, more = run_feed_forward(second, y, residual, offset=5, groups=groups)
        x = residual.add_post_norm(x, y, second.linear2, self.norm_out, offset=3, scale=0.5)
        losses = add_losses(losses, more)
        return x if losses is None else (x, losses)


class FastConformerEncoder(nn.Module):
    """FastConformer: mel rows to encoder frames.

    With the default options the function is transformers' ``ParakeetEncoder`` of each utterance
    alone, except that batch normalisation counts real frames only.
    """

    def __init__(
        self, config: FastConformerConfig, mel_bins: int, *, residual_in_fp32: bool = True
    ):
        super().__init__()
        self.config, self.residual_in_fp32 = config, residual_in_fp32
        self.router_losses: list[Tensor] = []
        first = config.context[0] if config.context else None
        self._trained = self._evaluated = first
        self._tables = PositionTables()
        width = config.width
        self.subsampling = ConvSubsampling(
            mel_bins,
            config.subsampling_channels,
            width,
            config.subsampling,
            causal=config.causal_subsampling,
        )
        self.subsampling_norm = nn.LayerNorm(width) if config.subsampling_norm else None
        self.layers = nn.ModuleList(ConformerLayer(config) for _ in range(config.layers))

    @property
    def context(self) -> Context | None:
        """The context in this mode; None for whole utterances."""
        return self._trained if self.training else self._evaluated

    def train_with(self, context: Context | None) -> None:
        """Set the context in training mode, for the micro-batches that follow."""
        self._trained = context

    def evaluate_with(self, context: Context | None) -> None:
        """Set the context in evaluation mode; the first of the configuration by default."""
        self._evaluated = context

    def forward(
        self,
        mel: MelFrames,
        expert: Tensor | None = None,
        before_shared: Callable[[PackedSequence], Tensor] | None = None,
        shared: int = 0,
    ) -> PackedSequence:
        """Encode (s T, mel_bins), s = ``config.subsampling``: (T, width), finite in the tail.

        ``before_shared`` is called before the last ``shared`` layers, and returns what they read.
        """
        # expert: int64 (N,), the expert of each utterance, where names choose: `Batch.expert`
        with ranges.range("subsampling"):
            x = self.subsampling(mel)
        if self.subsampling_norm is not None:
            x = self.subsampling_norm(x)
        if self.config.scale_input:
            x = x * math.sqrt(self.config.width)
        embeddings = self._embeddings(mel.layout, x.dtype)
        if self.config.input_positions and embeddings is not None:
            # Row reach - 1 + d is distance d; the tail may be longer than the table.
            rows = (mel.slot_positions + embeddings.shape[0] // 2).clamp(max=len(embeddings) - 1)
            x = torch.add(x, embeddings[rows], alpha=self.config.input_positions)
        x = F.dropout(x, self.config.input_dropout, self.training)
        groups = named_groups(self.config.experts, expert, mel.layout)
        context = replace(self._context(mel.layout, embeddings), groups=groups)
        x = residual_stream(x, in_fp32=self.residual_in_fp32)
        self.router_losses = []
        first = len(self.layers) - shared
        x = self._run(self.layers[:first], 0, x, context)
        if before_shared is not None:
            x = before_shared(PackedSequence(x, mel.layout))
        return PackedSequence(self._run(self.layers[first:], first, x, context), mel.layout)

    def encode_text(self, rows: PackedSequence, shared: int) -> PackedSequence:
        """Run the last ``shared`` layers on the rows of texts, (T, width)."""
        x, layout = rows.values, rows.layout
        context = self._context(layout, self._embeddings(layout, x.dtype))
        x = residual_stream(x, in_fp32=self.residual_in_fp32)
        self.router_losses = []
        return rows.with_values(self._run(self.layers[-shared:], -shared, x, context))

    def _run(self, layers: nn.ModuleList, first: int, x: Tensor, context: _Context) -> Tensor:
        if not len(layers):
            return x
        losses = self.router_losses if self.training else None
        first %= len(self.layers)
        return run_layers(layers, "encoder", x, context.layout, context, losses=losses, first=first)

    def _embeddings(self, layout: PackedLayout, dtype: torch.dtype) -> Tensor | None:
        config = self.config
        if config.position != "relative" and not config.input_positions:
            return None
        reach = config.max_frames
        if reach is None:
            # Few different sizes, so that memory blocks are used again.
            reach = -(-max(layout.max_seqlen_bound, 1) // _REACH_STEP) * _REACH_STEP
        elif reach < layout.max_seqlen_bound:
            raise ValueError(
                f"`max_frames` must be at least the {layout.max_seqlen_bound} frames of the "
                f"longest utterance, but is {reach}: raise `model.encoder.max_frames` or cut the "
                "utterance."
            )

        def make() -> Tensor:
            return relative_sinusoids(reach, config.width, layout.device).to(dtype)

        # Without a bound for all batches there may be many sizes.
        is_fixed = config.max_frames is not None or layout.static_max_seqlen is not None
        return self._tables.get(make, layout.cu_seqlens, reach, dtype) if is_fixed else make()

    def _context(self, layout: PackedLayout, embeddings: Tensor | None) -> _Context:
        seen = self.context
        if self.config.position != "relative" or embeddings is None:
            return _Context(layout, None, seen)
        if seen is not None:
            # No layer projects distances that its queries do not see.
            middle = embeddings.shape[0] // 2
            reach = min(middle + 1, seen.reach)
            embeddings = embeddings[middle + 1 - reach : middle + reach]
        dropped = F.dropout(embeddings, self.config.position_dropout, self.training)
        return _Context(layout, dropped, seen)


def _feed_forward(config: FastConformerConfig) -> FeedForward | ExpertFeedForward:
    return build_feed_forward(
        config.width,
        config.feed_forward,
        config.experts,
        activation="silu",
        bias=config.bias,
        dropout=config.activation_dropout,
    )


def _self_attention(config: FastConformerConfig) -> SelfAttention:
    sizes = config.width, config.heads, config.width // config.heads
    options = {"bias": config.bias, "dropout": config.attention_dropout}
    if config.position == "relative":
        return RelativeSelfAttention(*sizes, **options)
    rotary = Rotary() if config.position == "rotary" else None
    return SelfAttention(*sizes, rotary=rotary, **options)
