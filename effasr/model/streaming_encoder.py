"""The FastConformer encoder over many streams, chunk by chunk, with states of constant size.

`EncoderStep` is a function of tensors in plain PyTorch, so that it can be exported as a graph;
`StreamingEncoder` keeps its caches.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.checks import check
from effasr.data.features.config import FeatureConfig
from effasr.model.encoder import ConformerLayer, FastConformerConfig, FastConformerEncoder
from effasr.nn.attention import RelativeSelfAttention, SelfAttention
from effasr.nn.convolution import BatchNorm, ConformerConvolution
from effasr.nn.positions import sinusoids
from effasr.nn.subsampling import ConvSubsampling
from effasr_kernels import Context, Rotary

MOST_FRAMES = 10_000
"""Frames of a chunk, or before it, in a stream: 13 minutes of 80 ms each. A model of others may ask
for any number."""


def check_features(features: FeatureConfig) -> None:
    """Check that the features of a frame need no later audio."""
    check(
        not features.normalize,
        "features.normalize",
        "be false to decode a stream",
        features.normalize,
        "it needs the mean of the whole utterance; train with features.normalize=false",
    )


def check_streamable(config: object, context: Context | None) -> Context:
    """The context, checked to allow decoding frame by frame in constant memory."""
    if not isinstance(config, FastConformerConfig):
        kind = getattr(config, "kind", type(config).__name__)
        raise ValueError(
            f"`encoder.kind` must be fastconformer to decode a stream, but is {kind}: that encoder "
            "attends to whole utterances."
        )
    causal, experts = config.causal_convolution, config.experts
    remedy = "each layer would wait for later frames; train with causal_convolution=true"
    check(causal, "encoder.causal_convolution", "be true to decode a stream", causal, remedy)
    if context is None:
        raise ValueError(
            "`encoder.context` must be given to decode a stream, but the encoder attends to whole "
            "utterances: train with a context, such as {left: 56, right: 0, chunk: 7}."
        )
    left, right, chunk = context.left, context.right, context.chunk
    rule, remedy = "be limited to decode a stream in constant memory", "give a number of frames"
    check(left is not None, "context.left", rule, left, remedy)
    remedy = "each layer would wait for later frames: use a larger chunk"
    check(right == 0, "context.right", "be 0 to decode a stream", right, remedy)
    if experts is not None:
        learned, remedy = experts.is_learned, "a stream does not name its experts"
        check(learned, "experts.route", "be learned to decode a stream", experts.route, remedy)
    # The cache of a stream has so many frames from its beginning on.
    rule = f"be at most {MOST_FRAMES} to decode a stream"
    for name, frames in (("left", left or 0), ("chunk", chunk)):
        check(frames <= MOST_FRAMES, f"context.{name}", rule, frames, "choose another model")
    return context


class StreamCaches(NamedTuple):
    """State of B streams between chunks; zeros at first."""

    mel: Tensor  # float32 (B, kept s, mel_bins), the last rows
    keys: Sequence[Tensor]  # (B, left, heads, head_dim) of each layer
    values: Sequence[Tensor]  # (B, left, heads, head_dim)
    convolved: Sequence[Tensor]  # (B, conv_kernel - 1, 2 width), inputs of the convolutions
    frames: Tensor  # int64 (B,), frames so far
    missing: Tensor  # int64 (B,), rows that the last chunk lacked


class EncoderStep(nn.Module):
    """The encoder over the next chunk of each stream: c frames of s = ``subsampling`` mel rows."""

    def __init__(self, encoder: FastConformerEncoder, mel_bins: int, context: Context | None):
        super().__init__()
        self.context = check_streamable(encoder.config, context)
        self.left = cast(int, self.context.left)
        self.encoder, self.mel_bins = encoder, mel_bins
        # Slots of mel rows that a frame reads beside its own.
        self.kept = 2 if encoder.config.causal_subsampling else 1

    def begin(self, streams: int) -> StreamCaches:
        config, weight = self.encoder.config, self.encoder.subsampling.conv.weight
        shape = streams, self.left, config.heads, config.width // config.heads
        rows, taps = self.kept * config.subsampling, config.conv_kernel - 1
        layers = range(config.layers)
        return StreamCaches(
            weight.new_zeros(streams, rows, self.mel_bins, dtype=torch.float32),
            [weight.new_zeros(shape) for _ in layers],
            [weight.new_zeros(shape) for _ in layers],
            [weight.new_zeros(streams, taps, 2 * config.width) for _ in layers],
            weight.new_zeros(streams, dtype=torch.int64),
            weight.new_zeros(streams, dtype=torch.int64),
        )

    @torch.no_grad()
    def tables(self) -> list[Tensor | None]:
        """The table of relative positions of each layer, which depends on the weights alone."""
        return [self._table(cast(ConformerLayer, layer).self_attn) for layer in self.encoder.layers]

    def forward(
        self,
        features: Tensor,  # float32 (B, s c, mel_bins), real rows followed by arbitrary ones
        lengths: Tensor,  # int64 (B,), real rows: s c, fewer only in the last chunk
        frames: Tensor,  # int64 (B,), c, fewer in the last chunk, 0 for a stream left as it is
        caches: StreamCaches,
        tables: Sequence[Tensor | None] | None = None,  # from `tables`, to compute them once
    ) -> tuple[Tensor, StreamCaches]:
        """Encode a chunk of each stream, (B, c, width); the frames of a stream come first."""
        config, chunk, active = self.encoder.config, self.context.chunk, frames > 0
        x = self._subsampled(features, lengths, caches)
        position = torch.arange(self.left + chunk, device=x.device) - self.left
        seen = (position >= -caches.frames[:, None]) & (position < frames[:, None])
        # A softmax over nothing would be NaN.
        seen = seen | ~active[:, None]
        after: tuple[list[Tensor], ...] = ([], [], [])  # Keys, values, inputs of convolutions

        def append(kind: int, before: Sequence[Tensor], new: Tensor) -> Tensor:
            """The rows of a layer's cache and new ones, of which the next step sees the last."""
            cache = before[len(after[kind])]
            both = torch.cat([cache, new], 1)
            after[kind].append(_last_rows(cache, both, active).to(cache.dtype))
            return both

        def attend(module: SelfAttention, x: Tensor) -> Tensor:
            shape = -1, chunk, 3, module.heads, module.head_dim
            q, k, v = module.qkv_proj(x).view(shape).unbind(2)
            table = self._table(module) if tables is None else tables[len(after[0])]
            keys, values = append(0, caches.keys, k), append(1, caches.values, v)
            scores = self._scores(module, q.transpose(1, 2), keys.transpose(1, 2), table)
            scores = (scores * module.head_dim**-0.5).masked_fill(~seen[:, None, None], -torch.inf)
            y = scores.softmax(-1).to(values.dtype) @ values.transpose(1, 2)
            return module.o_proj(y.transpose(1, 2).flatten(2).flatten(0, 1))

        def convolve(module: ConformerConvolution, x: Tensor) -> Tensor:
            both = append(2, caches.convolved, module.pointwise1(x).unflatten(0, (-1, chunk)))
            taps, bias = module.depthwise.weight, module.depthwise.bias
            y = F.conv1d(F.glu(both, -1).mT, taps[:, None], bias, groups=taps.shape[0]).mT
            return module.pointwise2(F.silu(normalized(module, y.flatten(0, 1))))

        for layer in self.encoder.layers:
            x = conformer(layer, x, attend, convolve)
        missing = torch.where(active, config.subsampling * chunk - lengths, caches.missing)
        mel = _last_rows(caches.mel, torch.cat([caches.mel, features], 1), active)
        state = StreamCaches(mel, *after, caches.frames + frames, missing)
        return x.unflatten(0, (-1, chunk)), state

    def _subsampled(self, features: Tensor, lengths: Tensor, caches: StreamCaches) -> Tensor:
        """The input of the first layer, (B c, width)."""
        encoder, config = self.encoder, self.encoder.config
        factor, chunk, cached = config.subsampling, self.context.chunk, self.kept
        # Rows before a stream and behind it are zeros after every layer.
        begin = factor * (cached - caches.frames.clamp(max=cached))
        end = torch.maximum(factor * cached - caches.missing, begin) + lengths
        x = torch.cat([caches.mel, features], 1)
        x, _ = subsampled(encoder.subsampling, x, begin, end, causal=config.causal_subsampling)
        x = x[:, :, cached : cached + chunk].transpose(1, 2).flatten(2).flatten(0, 1)
        positions = caches.frames[:, None] + torch.arange(chunk, device=x.device)
        x = layer_input(encoder, encoder.subsampling.linear(x), positions.flatten())
        return x.float() if encoder.residual_in_fp32 else x

    def _scores(self, module: SelfAttention, q: Tensor, k: Tensor, table: Tensor | None) -> Tensor:
        """Scores before scaling: (B, H, c, D), (B, H, left + c, D) -> (B, H, c, left + c)."""
        if not isinstance(module, RelativeSelfAttention):
            if module.rotary is not None:
                # Only differences of places matter, so that they count from the oldest key.
                q, k = rotated(q, module.rotary, self.left), rotated(k, module.rotary)
            return q @ k.mT
        assert table is not None
        by_distance = (q + module.bias_v[:, None]) @ table
        # Entry 0 is the distance of the first query and the last key.
        chunk, keys = self.context.chunk, self.left + self.context.chunk
        query = torch.arange(chunk, device=q.device)[:, None]
        entry = query + keys - 1 - torch.arange(keys, device=q.device)
        entry = entry.expand(q.shape[0], module.heads, -1, -1)
        return (q + module.bias_u[:, None]) @ k.mT + by_distance.gather(-1, entry)

    def _table(self, module: SelfAttention) -> Tensor | None:
        """The projected distances from 1 - c to left + c - 1: (H, D, R); None if not relative."""
        if not isinstance(module, RelativeSelfAttention):
            return None
        weight, chunk = module.relative_k_proj.weight, self.context.chunk
        distances = torch.arange(1 - chunk, self.left + chunk, device=weight.device)
        table = module.relative_k_proj(sinusoids(distances, weight.shape[1]).to(weight.dtype))
        return table.unflatten(-1, (module.heads, -1)).permute(1, 2, 0)


class StreamingEncoder:
    """Encodes chunks of several streams at a time, as the encoder does with the same context.

    All tensors have the sizes of the slots, whatever number of them is in use: S slots, chunks of c
    frames, ``left`` earlier frames. A slot has one stream at a time, and no work waits for the
    device. The encoder must not change while streams are open.
    """

    def __init__(
        self, encoder: FastConformerEncoder, mel_bins: int, slots: int, context: Context | None
    ):
        self._step = EncoderStep(encoder, mel_bins, context)
        check(slots >= 1, "slots", "be at least 1", slots)
        self.slots, self._factor = slots, encoder.config.subsampling
        self._caches, self._tables = self._step.begin(slots), self._step.tables()

    @torch.inference_mode()
    def start(self, slot: int) -> None:
        """Begin a stream in a slot, whose former stream is forgotten."""
        # NaN times the weight 0 of a key that is not seen would be NaN.
        for layers in (self._caches.keys, self._caches.values, self._caches.convolved):
            for cache in layers:
                cache[slot] = 0
        self._caches.frames[slot] = self._caches.missing[slot] = 0

    @torch.inference_mode()
    def step(self, mel: Tensor, rows: Sequence[int], frames: Sequence[int] | None = None) -> Tensor:
        """Encode the next chunk of each stream: (S, c, width); the frames of a slot come first.

        ``rows`` are the real mel rows of each slot: s c; fewer only in the last chunk of a stream;
        0 for a slot that is left as it is. ``frames`` are ``ceil(rows / s)`` by default; causal
        subsampling gives more of them at the end of a stream.
        """
        # mel: float32 (S, s c, mel_bins), s = ``config.subsampling``; what follows the real rows of
        # a slot is ignored
        if frames is None:
            frames = [-(-count // self._factor) for count in rows]
        counts = torch.tensor([list(rows), list(frames)], device=mel.device)
        encoded, self._caches = self._step(mel, *counts, self._caches, self._tables)
        return encoded


def subsampled(
    module: ConvSubsampling, x: Tensor, begin: Tensor, end: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Map the rows from ``begin`` to ``end`` of (B, T, bins) to (B, channels, T', bands).

    The other rows are zeros after every layer. Also returns the ends of the results.
    """
    x = _zero_outside(x[:, None], begin, end)
    for depthwise, pointwise in [(module.conv, None), *module.stages()]:
        if causal:
            size = end - begin
            x = F.pad(x, (2, 1, 2, 1))
            x = F.conv2d(x, depthwise.weight, depthwise.bias, stride=2, groups=depthwise.groups)
            begin = begin // 2
            end = begin + size // 2 + 1
        else:
            x = depthwise(x)
            begin, end = begin // 2, (end + 1) // 2
        if pointwise is not None:
            x = pointwise(x.movedim(1, -1)).movedim(-1, 1)
        x = _zero_outside(F.relu(x), begin, end)
    return x, end


def layer_input(encoder: FastConformerEncoder, x: Tensor, positions: Tensor) -> Tensor:
    """The input of the first layer for subsampled frames (..., T, width) at positions (T,)."""
    config = encoder.config
    if encoder.subsampling_norm is not None:
        x = encoder.subsampling_norm(x)
    if config.scale_input:
        x = x * math.sqrt(config.width)
    if config.input_positions:
        x = x + config.input_positions * sinusoids(positions, config.width).to(x)
    return x


def conformer(
    module: nn.Module, x: Tensor, attend: Callable[..., Tensor], convolve: Callable[..., Tensor]
) -> Tensor:
    """A layer in evaluation mode, with these functions of its modules and their inputs."""
    layer = cast(ConformerLayer, module)
    x = x + 0.5 * layer.feed_forward1(layer.norm_feed_forward1(x))
    x = x + attend(layer.self_attn, layer.norm_self_att(x))
    x = x + convolve(layer.conv, layer.norm_conv(x))
    x = x + 0.5 * layer.feed_forward2(layer.norm_feed_forward2(x))
    return layer.norm_out(x)


def normalized(module: ConformerConvolution, x: Tensor) -> Tensor:
    """Apply the norm of a convolution module to (..., width), in evaluation mode."""
    norm = module.norm
    if not isinstance(norm, BatchNorm):
        return norm(x)
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    return x * scale + (norm.bias - norm.running_mean * scale)


def rotated(x: Tensor, rotary: Rotary, first: int = 0) -> Tensor:
    """Apply rotary embedding to (B, heads, T, D), whose places count from ``first``."""
    half = rotary.rotated(x.shape[-1]) // 2
    if not half:
        return x
    rates = torch.tensor([rotary.base ** (-c / half) for c in range(half)], device=x.device)
    angles = (first + torch.arange(x.shape[2], device=x.device))[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    x1, x2, unrotated = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
    return torch.cat([*turned, unrotated] if unrotated.shape[-1] else turned, -1)


def _last_rows(cache: Tensor, both: Tensor, active: Tensor) -> Tensor:
    """The last rows of both, (B, n, ...), for active streams, else the cache."""
    last = both[:, both.shape[1] - cache.shape[1] :]
    return torch.where(active.view(-1, *[1] * (cache.ndim - 1)), last, cache)


def _zero_outside(x: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """Set the rows of (B, channels, T, bands) before a begin and from an end on to zero."""
    rows = torch.arange(x.shape[2], device=x.device)
    real = (rows >= begin[:, None]) & (rows < end[:, None])
    return x.masked_fill(~real[:, None, :, None], 0.0)
