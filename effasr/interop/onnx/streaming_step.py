"""A step of a streaming encoder in plain PyTorch, for export to other formats.

Functions and weights are those of `effasr.model.streaming_encoder.StreamingEncoder`; the caches are
inputs and outputs. Speed does not matter here.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.interop.onnx.padded_model import normalized, rotated
from effasr.model.asr import ASRModel
from effasr.model.encoder import ConformerLayer, FastConformerEncoder
from effasr.model.streaming_encoder import check_streamable
from effasr.nn.attention import RelativeSelfAttention, SelfAttention
from effasr.nn.convolution import ConformerConvolution
from effasr.nn.positions import sinusoids
from effasr_kernels import Context

CACHES = ("cache_mel", "cache_keys", "cache_values", "cache_conv", "cache_frames", "cache_missing")
"""Inputs that the outputs ``next_...`` of the step before replace."""
_LAYERED = ("cache_keys", "cache_values", "cache_conv")


class StreamingStep(nn.Module):
    """The encoder over the next chunk of each stream, and what CTC or a transducer makes of it."""

    def __init__(self, model: ASRModel, context: Context):
        super().__init__()
        self.context = check_streamable(model.config.encoder, context)
        self.encoder = cast(FastConformerEncoder, model.encoder)
        self.mel_bins = model.config.features.mel_bins
        self.ctc_head = model.ctc_head
        head = model.transducer
        self.transducer_projection = None if head is None else head.encoder_projection
        self.outputs = ["encoded"]
        if model.ctc_head is not None:
            self.outputs.append("ctc_log_probs")
        if head is not None:
            self.outputs.append("encoder_projected")
        self.outputs += [name.replace("cache", "next") for name in CACHES]

    @property
    def kept(self) -> int:
        """Slots of mel rows that a frame reads beside its own."""
        return 2 if self.encoder.config.causal_subsampling else 1

    @staticmethod
    def batch_axis(name: str) -> int:
        return 1 if name in _LAYERED else 0

    def begin(self, streams: int) -> dict[str, Tensor]:
        """The caches before the first step: zeros."""
        config, left = self.encoder.config, cast(int, self.context.left)
        heads, head_dim = config.heads, config.width // config.heads
        before = torch.zeros(config.layers, streams, left, heads, head_dim)
        counts = torch.zeros(streams, dtype=torch.int64)
        made = (
            torch.zeros(streams, self.kept * config.subsampling, self.mel_bins),
            before,
            before.clone(),
            torch.zeros(config.layers, streams, config.conv_kernel - 1, 2 * config.width),
            counts,
            counts.clone(),
        )
        return dict(zip(CACHES, made, strict=True))

    def forward(
        self,
        features: Tensor,
        lengths: Tensor,
        frames: Tensor,
        cache_mel: Tensor,
        cache_keys: Tensor,
        cache_values: Tensor,
        cache_conv: Tensor,
        cache_frames: Tensor,
        cache_missing: Tensor,
    ) -> tuple[Tensor, ...]:
        """Encode the next chunk: c frames of s = ``subsampling`` mel rows."""
        # features: float32 (B, s c, mel_bins), real rows followed by arbitrary ones; lengths: int64
        # (B,), real rows: s c, fewer only in the last chunk; frames: int64 (B,), frames of the
        # chunk: c, fewer only in the last one, 0 for a stream that is left as it is; cache_mel:
        # float32 (B, kept s, mel_bins), the rows before; cache_keys: float32 (layers, B, left,
        # heads, head_dim); cache_conv: float32 (layers, B, conv_kernel - 1, 2 width), inputs of the
        # convolutions; cache_frames: int64 (B,), frames so far; cache_missing: int64 (B,), rows
        # that the chunk before lacked -> (B, c, width), (B, c, V + 1), (B, c, J)
        config, context = self.encoder.config, self.context
        chunk, active = context.chunk, frames > 0
        x = self._subsampled(features, lengths, cache_mel, cache_frames, cache_missing)
        place = torch.arange(cast(int, context.left) + chunk, device=x.device)
        place = place - cast(int, context.left)
        seen = (place >= -cache_frames[:, None]) & (place < frames[:, None])
        # A softmax over nothing would be NaN.
        seen = seen | ~active[:, None]
        keys, values, convolved = [], [], []
        for number, one in enumerate(self.encoder.layers):
            layer = cast(ConformerLayer, one)
            x = x + 0.5 * layer.feed_forward1(layer.norm_feed_forward1(x))
            y, *heard = self._attended(
                layer.self_attn,
                layer.norm_self_att(x),
                cache_keys[number],
                cache_values[number],
                seen,
            )
            keys.append(_kept(cache_keys[number], heard[0], active))
            values.append(_kept(cache_values[number], heard[1], active))
            x = x + y
            y, both = _convolution(layer.conv, layer.norm_conv(x), cache_conv[number])
            convolved.append(_kept(cache_conv[number], both, active))
            x = x + y
            x = x + 0.5 * layer.feed_forward2(layer.norm_feed_forward2(x))
            x = layer.norm_out(x)
        found = [x]
        if self.ctc_head is not None:
            found.append(self.ctc_head(x).log_softmax(-1))
        if self.transducer_projection is not None:
            found.append(self.transducer_projection(x))
        mel = _kept(cache_mel, torch.cat([cache_mel, features], 1), active)
        missing = torch.where(active, config.subsampling * chunk - lengths, cache_missing)
        found += [mel, *(torch.stack(part) for part in (keys, values, convolved))]
        return (*found, cache_frames + frames, missing)

    def _subsampled(
        self, features: Tensor, lengths: Tensor, mel: Tensor, before: Tensor, missing: Tensor
    ) -> Tensor:
        """The input of the first layer, (B, c, width)."""
        encoder, config = self.encoder, self.encoder.config
        factor, chunk, kept = config.subsampling, self.context.chunk, self.kept
        causal = config.causal_subsampling
        # Rows before a stream and behind it are zeros after every layer.
        begin = factor * (kept - before.clamp(max=kept))
        end = torch.maximum(factor * kept - missing, begin) + lengths
        x = torch.cat([mel, features], 1)[:, None]
        x = _masked(x, begin, end)
        module = encoder.subsampling
        stages = [(module.conv, None), *module.stages()]
        for depthwise, pointwise in stages:
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
            x = _masked(F.relu(x), begin, end)
        x = x[:, :, kept : kept + chunk].transpose(1, 2).flatten(2)
        x = module.linear(x)
        if encoder.subsampling_norm is not None:
            x = encoder.subsampling_norm(x)
        if config.scale_input:
            x = x * math.sqrt(config.width)
        if config.input_positions:
            place = (before[:, None] + torch.arange(chunk, device=x.device)).flatten()
            x = x + config.input_positions * sinusoids(place, config.width).view_as(x)
        return x

    def _attended(
        self, module: SelfAttention, x: Tensor, keys: Tensor, values: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend: (B, c, width), and keys and values with the new ones, (B, left + c, H, D)."""
        left = cast(int, self.context.left)
        q, k, v = (
            part.unflatten(-1, (module.heads, -1)) for part in module.qkv_proj(x).chunk(3, -1)
        )
        keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        q, k = q.transpose(1, 2), keys.transpose(1, 2)
        if isinstance(module, RelativeSelfAttention):
            scores = (q + module.bias_u[:, None]) @ k.mT + self._by_distance(module, q)
        elif module.rotary is not None:
            # Only differences of places matter, so that they count from the oldest key.
            scores = rotated(q, module.rotary, left) @ rotated(k, module.rotary).mT
        else:
            scores = q @ k.mT
        scores = (scores * module.head_dim**-0.5).masked_fill(~seen[:, None, None], -torch.inf)
        y = scores.softmax(-1) @ values.transpose(1, 2)
        return module.o_proj(y.transpose(1, 2).flatten(2)), keys, values

    def _by_distance(self, module: RelativeSelfAttention, q: Tensor) -> Tensor:
        """Scores of the distances of (B, H, c, D) to left + c keys."""
        chunk, left = self.context.chunk, cast(int, self.context.left)
        weight = module.relative_k_proj.weight
        distances = torch.arange(1 - chunk, left + chunk, device=q.device)
        table = module.relative_k_proj(sinusoids(distances, weight.shape[1]))
        table = table.unflatten(-1, (module.heads, -1)).permute(1, 2, 0)
        scores = (q + module.bias_v[:, None]) @ table
        # Entry 0 is the distance of the first query and the last key.
        query = torch.arange(chunk, device=q.device)[:, None]
        entry = query + chunk - 1 + left - torch.arange(left + chunk, device=q.device)
        return scores.gather(-1, entry.expand(q.shape[0], module.heads, -1, -1))


def _convolution(module: ConformerConvolution, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve (B, c, width); also its input with the rows before, (B, taps - 1 + c, 2 width)."""
    both = torch.cat([before, module.pointwise1(x)], 1)
    taps, bias = module.depthwise.weight, module.depthwise.bias
    y = F.conv1d(F.glu(both, -1).mT, taps[:, None], bias, groups=taps.shape[0]).mT
    return module.pointwise2(F.silu(normalized(module, y))), both


def _kept(cache: Tensor, both: Tensor, active: Tensor) -> Tensor:
    """The last rows of both, (B, n, ...), for active streams, else the cache."""
    last = both[:, both.shape[1] - cache.shape[1] :]
    return torch.where(active.view(-1, *[1] * (cache.ndim - 1)), last, cache)


def _masked(x: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """Set the rows of (B, channels, T, bands) before a begin and from an end on to zero."""
    rows = torch.arange(x.shape[2], device=x.device)
    real = (rows >= begin[:, None]) & (rows < end[:, None])
    return x.masked_fill(~real[:, None, :, None], 0.0)
