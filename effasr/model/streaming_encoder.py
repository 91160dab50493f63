"""The FastConformer encoder over many streams, chunk by chunk, with states of constant size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from effasr.data.features.config import FeatureConfig
from effasr.data.features.frame_geometry import Framing
from effasr.data.features.log_mel import MelFrames
from effasr.model.encoder import ConformerLayer, FastConformerConfig, FastConformerEncoder
from effasr.nn.attention import RelativeSelfAttention, SelfAttention
from effasr.nn.checks import check
from effasr.nn.convolution import BatchNorm, ConformerConvolution
from effasr.nn.positions import sinusoids
from effasr_kernels import Context, PackedLayout
from effasr_kernels.attention.position import angles, rotate

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


class StreamingEncoder:
    """Encodes chunks of several streams at a time, as the encoder does with the same context.

    All tensors have the sizes of the slots, whatever number of them is in use: S slots, chunks of c
    frames, ``left`` earlier frames. A slot has one stream at a time, and no work waits for the
    device. The encoder must not change while streams are open.
    """

    def __init__(
        self, encoder: FastConformerEncoder, mel_bins: int, slots: int, context: Context | None
    ):
        self.context = context = check_streamable(encoder.config, context)
        check(slots >= 1, "slots", "be at least 1", slots)
        self.slots, self._encoder = slots, encoder
        config, remaining = encoder.config, cast(int, context.left)
        weight = encoder.subsampling.conv.weight
        heads, head_dim = config.heads, config.width // config.heads
        zeros = lambda *shape: weight.new_zeros(config.layers, slots, *shape)
        # Keys and values, and the input of the depthwise convolution, which is zero before a start.
        self._keys, self._values = (zeros(remaining, heads, head_dim) for _ in range(2))
        self._convolved = zeros(config.conv_kernel - 1, 2 * config.width)
        # Slots of mel rows that a frame reads beside its own.
        self._kept = 2 if config.causal_subsampling else 1
        rows = self._kept * config.subsampling
        self._mel = weight.new_zeros(slots, rows, mel_bins, dtype=torch.float32)
        self._seen = [0] * slots
        # Rows that the last chunk of a stream lacks, where causal subsampling adds a frame to it.
        self._missing = [0] * slots
        self._tables = [self._table(layer.self_attn) for layer in self._layers()]
        self._rows = PackedLayout.from_lengths([slots * context.chunk], weight.device)

    def start(self, slot: int) -> None:
        """Begin a stream in a slot, whose former stream is forgotten."""
        self._seen[slot] = self._missing[slot] = 0
        # NaN times the weight 0 of a key that is not seen would be NaN.
        for state in (self._keys, self._values, self._convolved):
            state[:, slot] = 0

    @torch.inference_mode()
    def step(self, mel: Tensor, rows: Sequence[int], frames: Sequence[int] | None = None) -> Tensor:
        """Encode the next chunk of each stream: (S, c, width); the frames of a slot come first.

        ``rows`` are the real mel rows of each slot: s c; fewer only in the last chunk of a stream;
        0 for a slot that is left as it is. ``frames`` are ``ceil(rows / s)`` by default; causal
        subsampling gives more of them at the end of a stream.
        """
        # mel: float32 (S, s c, mel_bins), s = ``config.subsampling``; what follows the real rows of
        # a slot is ignored
        chunk, factor = self.context.chunk, self._encoder.config.subsampling
        if frames is None:
            frames = [-(-count // factor) for count in rows]
        x = self._subsample(mel, rows, frames)
        device = x.device
        counts = torch.tensor([frames, self._seen], device=device)
        active = counts[0] > 0
        seen = self._visible(*counts)
        for number, layer in enumerate(self._layers()):
            x = self._layer(number, layer, x, seen, active)
        last = torch.cat([self._mel, mel], 1)[:, -self._kept * factor :]
        self._mel = torch.where(active[:, None, None], last, self._mel)
        self._seen = [before + count for before, count in zip(self._seen, frames, strict=True)]
        self._missing = [
            factor * chunk - real if count else before
            for real, count, before in zip(rows, frames, self._missing, strict=True)
        ]
        return x.unflatten(0, (self.slots, chunk))

    def _layers(self) -> list[ConformerLayer]:
        return [cast(ConformerLayer, layer) for layer in self._encoder.layers]

    def _subsample(self, mel: Tensor, rows: Sequence[int], frames: Sequence[int]) -> Tensor:
        """The input of the first layer, (S c, width).

        A frame reads the rows of its own slot of s rows and of those before it that are kept.
        """
        encoder, config, chunk = self._encoder, self._encoder.config, self.context.chunk
        factor, device, most = config.subsampling, mel.device, self._kept
        framing = Framing(hop=1, subsampling=factor, causal=config.causal_subsampling)
        both = torch.cat([self._mel, mel], 1).unflatten(1, (most + chunk, factor))
        lengths, real, places, targets = [], [], [], [0] * (self.slots * chunk)
        for slot, (count, before) in enumerate(zip(frames, self._seen, strict=True)):
            cached = min(before, most) if count else 0
            first = slot * (most + chunk) + most - cached
            for index in range(count):
                targets[slot * chunk + index] = len(places) + cached + index
            real.append(max(0, factor * cached - self._missing[slot]) + rows[slot])
            # Causal convolutions need the zeros of the frame that would follow.
            lengths.append(framing.frames(real[-1]))
            places += range(first, first + cached + count)
            places += [0] * (lengths[-1] - cached - count)
        total = self.slots * (most + chunk + 1)
        layout = PackedLayout.from_lengths(
            lengths, device, rows=total, static_max_seqlen=most + chunk + 1
        )
        places += [0] * (total - len(places))
        values = both.flatten(0, 1)[torch.tensor(places, device=device)].flatten(0, 1)
        packed = MelFrames(values, layout, torch.tensor(real, device=device), factor)
        packed = packed.with_values(values.masked_fill(~packed.mask[:, None], 0.0))
        x = encoder.subsampling(packed)[torch.tensor(targets, device=device)]
        if encoder.subsampling_norm is not None:
            x = encoder.subsampling_norm(x)
        if config.scale_input:
            x = x * math.sqrt(config.width)
        if config.input_positions:
            position = torch.tensor(self._seen, device=device)[:, None]
            position = (position + torch.arange(chunk, device=device)).flatten()
            x = torch.add(x, sinusoids(position, config.width).to(x), alpha=config.input_positions)
        return x.float() if encoder.residual_in_fp32 else x

    def _visible(self, frames: Tensor, before: Tensor) -> Tensor:
        """Which of the keys, ``left`` earlier ones and c new ones, exist: bool (S, left + c)."""
        remaining, chunk = cast(int, self.context.left), self.context.chunk
        position = torch.arange(remaining + chunk, device=frames.device) - remaining
        seen = (position >= -before[:, None]) & (position < frames[:, None])
        # A slot without a stream sees zeros, as a softmax over nothing is NaN.
        return seen | (frames == 0)[:, None]

    def _layer(
        self, number: int, layer: ConformerLayer, x: Tensor, seen: Tensor, active: Tensor
    ) -> Tensor:
        x = x + 0.5 * layer.feed_forward1(layer.norm_feed_forward1(x))
        x = x + self._attend(number, layer.self_attn, layer.norm_self_att(x), seen, active)
        x = x + self._convolve(number, layer.conv, layer.norm_conv(x), active)
        x = x + 0.5 * layer.feed_forward2(layer.norm_feed_forward2(x))
        return layer.norm_out(x)

    def _attend(
        self, number: int, module: SelfAttention, x: Tensor, seen: Tensor, active: Tensor
    ) -> Tensor:
        shape = self.slots, self.context.chunk, 3, module.heads, module.head_dim
        q, k, v = module.qkv_proj(x).view(shape).unbind(2)
        keys = _appended(self._keys[number], k, active)
        values = _appended(self._values[number], v, active)
        scores = self._scores(number, module, q, keys) * module.head_dim**-0.5
        weights = scores.masked_fill(~seen[:, None, None], -torch.inf).float().softmax(-1)
        y = torch.einsum("nhij,njhd->nihd", weights.to(values.dtype), values)
        return module.o_proj(y.flatten(2).flatten(0, 1))

    def _scores(self, number: int, module: SelfAttention, q: Tensor, keys: Tensor) -> Tensor:
        """Scores before scaling: (S, c, H, D), (S, left + c, H, D) -> (S, H, c, left + c)."""
        table, remaining = self._tables[number], cast(int, self.context.left)
        if not isinstance(module, RelativeSelfAttention):
            if module.rotary is not None:
                # Only differences of places matter, so that they count from the oldest key.
                layout = PackedLayout.from_lengths([keys.shape[1]], q.device)
                cos, sin = angles(layout, module.rotary, q)
                turned = rotate(keys.transpose(0, 1).flatten(1, 2), cos, sin)
                keys = turned.view(keys.shape[1], self.slots, *keys.shape[2:]).transpose(0, 1)
                turned = rotate(q.transpose(0, 1).flatten(1, 2), cos[remaining:], sin[remaining:])
                q = turned.view(q.shape[1], self.slots, *q.shape[2:]).transpose(0, 1)
            return torch.einsum("nihd,njhd->nhij", q, keys)
        content = torch.einsum("nihd,njhd->nhij", q + module.bias_u, keys)
        assert table is not None
        by_distance = torch.einsum("nihd,rhd->nhir", q + module.bias_v, table)
        chunk, device = self.context.chunk, q.device
        query = torch.arange(chunk, device=device)[:, None]
        # Entry 0 is the distance of the first query and the last key.
        entry = query + chunk - 1 + remaining - torch.arange(remaining + chunk, device=device)
        return content + by_distance.gather(-1, entry.expand(*content.shape))

    @torch.inference_mode()
    def _table(self, module: SelfAttention) -> Tensor | None:
        """The projected distances from 1 - c to left + c - 1: (R, H, D), or None."""
        if not isinstance(module, RelativeSelfAttention):
            return None
        weight, chunk = module.relative_k_proj.weight, self.context.chunk
        last = cast(int, self.context.left) + chunk
        distances = torch.arange(1 - chunk, last, device=weight.device)
        embeddings = sinusoids(distances, weight.shape[1]).to(weight.dtype)
        return module.relative_k_proj(embeddings).view(-1, module.heads, module.head_dim)

    def _convolve(
        self, number: int, module: ConformerConvolution, x: Tensor, active: Tensor
    ) -> Tensor:
        new = module.pointwise1(x).unflatten(0, (self.slots, -1))
        gated = F.glu(_appended(self._convolved[number], new, active), -1)
        taps, bias = module.depthwise.weight, module.depthwise.bias
        y = F.conv1d(gated.mT, taps[:, None], bias, groups=taps.shape[0]).mT.flatten(0, 1)
        if isinstance(module.norm, BatchNorm):
            y = module.norm(y, self._rows, silu=True)
        else:
            y = F.silu(module.norm(y))
        return module.pointwise2(y)


def _appended(state: Tensor, new: Tensor, active: Tensor) -> Tensor:
    """Append (S, c, ...) to a state (S, n, ...), which keeps the last n rows of active slots."""
    both = torch.cat([state, new.to(state.dtype)], 1)
    last = both[:, both.shape[1] - state.shape[1] :]
    state.copy_(torch.where(active.view(-1, *[1] * (state.ndim - 1)), last, state))
    return both
