"""The model over padded batches in plain PyTorch, for export to other formats.

Functions and weights are those of `effasr.model.asr.ASRModel` in evaluation mode; only the layout
differs. Speed does not matter here.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.model.asr import ASRModel
from effasr.model.decoder import Decoder, DecoderLayer
from effasr.model.encoder import ConformerLayer, FastConformerEncoder
from effasr.model.whisper_encoder import WhisperEncoder
from effasr.nn.attention import CrossAttention, RelativeSelfAttention, SelfAttention
from effasr.nn.convolution import BatchNorm, ConformerConvolution
from effasr.nn.positions import relative_sinusoids, sinusoids
from effasr.nn.subsampling import ConvSubsampling
from effasr.nn.transformer_layer import TransformerLayer
from effasr_kernels import Rotary


class PaddedEncoder(nn.Module):
    """Encoder, and everything that the other parts compute once from its output."""

    def __init__(self, model: ASRModel):
        super().__init__()
        self.encoder, self.projection = model.encoder, model.projection
        self.mel_bins = model.config.features.mel_bins
        self.decoder, self.ctc_head = model.decoder, model.ctc_head
        head = model.transducer
        self.transducer_projection = None if head is None else head.encoder_projection
        self.outputs = ["encoded", "encoded_lengths"]
        if model.decoder is not None:
            self.outputs += ["cross_keys", "cross_values"]
        if model.ctc_head is not None:
            self.outputs.append("ctc_log_probs")
        if model.transducer is not None:
            self.outputs.append("encoder_projected")

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        # features: float32 (B, T, mel_bins), from `effasr.data.features.log_mel.LogMel` for each
        # utterance, followed by arbitrary rows; lengths: int64 (B,), real rows of each, at least
        # one -> (B, T / subsampling rounded up, width), int64 (B,), (layers, B, heads, frames,
        # head_dim), (B, frames, V + 1), (B, frames, J)
        if isinstance(self.encoder, WhisperEncoder):
            x, lengths = _whisper(self.encoder, features, lengths)
        else:
            x, lengths = _fastconformer(self.encoder, features, lengths)
        found = [x, lengths]
        if self.decoder is not None:
            projected = x if self.projection is None else self.projection(x)
            layers = [cast(DecoderLayer, layer) for layer in self.decoder.layers]
            pairs = [_heads_kv(layer.encoder_attn, projected) for layer in layers]
            found += [torch.stack([pair[which] for pair in pairs]) for which in (0, 1)]
        if self.ctc_head is not None:
            found.append(self.ctc_head(x).log_softmax(-1))
        if self.transducer_projection is not None:
            found.append(self.transducer_projection(x))
        return tuple(found)


class PaddedDecoderStep(nn.Module):
    """Decoder step for one token per utterance, all at the same position."""

    def __init__(self, model: ASRModel):
        super().__init__()
        self.decoder = cast(Decoder, model.decoder)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        past_keys: Tensor,
        past_values: Tensor,
        cross_keys: Tensor,
        cross_values: Tensor,
        encoded_lengths: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # tokens: int64 (B,), the next token of each; positions: int64 (B,), P; an exporter would
        # make a constant of a size; past_keys: (layers, B, heads, P, head_dim), of the P earlier
        # tokens, none at first -> (B, V)
        decoder = self.decoder
        x = decoder.embed(tokens, positions)[:, None]
        heard = _mask(encoded_lengths, cross_keys.shape[3])[:, None, None]
        keys, values = [], []
        for number, one in enumerate(decoder.layers):
            layer = cast(DecoderLayer, one)
            q, k, v = _heads_qkv(layer.self_attn, layer.input_layernorm(x))
            k = torch.cat([past_keys[number], k], 2)
            v = torch.cat([past_values[number], v], 2)
            keys.append(k)
            values.append(v)
            x = x + _joined(layer.self_attn, _attend(q, k, v))
            attention = layer.encoder_attn
            q = _split(attention.q_proj(layer.post_attention_layernorm(x)), attention.heads)
            y = _attend(q, cross_keys[number], cross_values[number], heard)
            x = x + _joined(attention, y)
            x = x + layer.mlp(layer.final_layernorm(x))
        return decoder.logits(decoder.norm(x[:, 0])), torch.stack(keys), torch.stack(values)


def _fastconformer(
    encoder: FastConformerEncoder, x: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Map (B, T, mel_bins) to (B, T / subsampling, width)."""
    config = encoder.config
    x, lengths = _subsampled(encoder.subsampling, x, lengths)
    if encoder.subsampling_norm is not None:
        x = encoder.subsampling_norm(x)
    if config.scale_input:
        x = x * math.sqrt(config.width)
    frames = x.shape[1]
    if config.input_positions:
        places = sinusoids(torch.arange(frames, device=x.device), config.width)
        x = x + config.input_positions * places
    real = _mask(lengths, frames)
    for layer in encoder.layers:
        x = _conformer(cast(ConformerLayer, layer), x, real)
    return x, lengths


def _whisper(encoder: WhisperEncoder, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Map (B, T, mel_bins) to (B, T / 2, width)."""
    stem = encoder.stem
    x = x * _mask(lengths, x.shape[1])[..., None]
    # If the number of rows is odd, the last row is followed by zeros, as at every end.
    x = F.gelu(stem.conv1(x.mT)) * _mask(lengths, x.shape[1])[:, None]
    x, lengths = F.gelu(stem.conv2(x)).mT, (lengths + 1) // 2
    places = torch.arange(x.shape[1], device=x.device)
    x = x + encoder.places(places)
    real = _mask(lengths, x.shape[1])
    for one in encoder.layers:
        layer = cast(TransformerLayer, one)
        x = x + _self_attention(layer.self_attn, layer.norm_self_att(x), real)
        x = x + layer.feed_forward(layer.norm_feed_forward(x))
    return encoder.norm(x), lengths


def _subsampled(module: ConvSubsampling, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Map (B, T, mel_bins) to (B, T / subsampling, width).

    Behind each utterance are zeros after every layer.
    """

    def masked(x: Tensor, lengths: Tensor) -> Tensor:
        return x.masked_fill(~_mask(lengths, x.shape[2])[:, None, :, None], 0.0)

    x = masked(x[:, None], lengths)
    lengths = (lengths + 1) // 2
    x = masked(F.relu(module.conv(x)), lengths)
    for depthwise, pointwise in module.stages():
        lengths = (lengths + 1) // 2
        y = pointwise(masked(depthwise(x), lengths).movedim(1, -1))
        x = masked(F.relu(y).movedim(-1, 1), lengths)
    return module.linear(x.transpose(1, 2).flatten(2)), lengths


def _conformer(layer: ConformerLayer, x: Tensor, real: Tensor) -> Tensor:
    x = x + 0.5 * layer.feed_forward1(layer.norm_feed_forward1(x))
    x = x + _self_attention(layer.self_attn, layer.norm_self_att(x), real)
    x = x + _convolution(layer.conv, layer.norm_conv(x), real)
    x = x + 0.5 * layer.feed_forward2(layer.norm_feed_forward2(x))
    return layer.norm_out(x)


def _self_attention(module: SelfAttention, x: Tensor, real: Tensor) -> Tensor:
    q, k, v = _heads_qkv(module, x)
    mask = real[:, None, None]
    if not isinstance(module, RelativeSelfAttention):
        if module.rotary is not None:
            q, k = rotated(q, module.rotary), rotated(k, module.rotary)
        return _joined(module, _attend(q, k, v, mask))
    frames, scale = x.shape[1], module.head_dim**-0.5
    # Sorted from the largest distance to the smallest, so that they follow a query's keys in order.
    embeddings = relative_sinusoids(frames, module.relative_k_proj.in_features, x.device).flip(0)
    table = _split(module.relative_k_proj(embeddings)[None], module.heads)
    content = (q + module.bias_u[:, None]) @ k.mT
    position = (q + module.bias_v[:, None]) @ table.mT
    # Row i is shifted left by i columns.
    batch, heads = x.shape[0], module.heads
    shifted = F.pad(position, (1, 0)).reshape(batch, heads, 2 * frames, frames)[:, :, 1:]
    position = shifted.reshape(batch, heads, frames, 2 * frames - 1)[..., :frames]
    scores = ((content + position) * scale).masked_fill(~mask, -torch.inf)
    return _joined(module, scores.softmax(-1) @ v)


def _convolution(module: ConformerConvolution, x: Tensor, real: Tensor) -> Tensor:
    x = F.glu(module.pointwise1(x), -1) * real[..., None]
    taps = module.depthwise.weight
    x = F.conv1d(
        x.mT, taps[:, None], module.depthwise.bias, padding=taps.shape[1] // 2, groups=taps.shape[0]
    ).mT
    return module.pointwise2(F.silu(normalized(module, x)))


def normalized(module: ConformerConvolution, x: Tensor) -> Tensor:
    """Apply the norm of a convolution module to (B, T, width)."""
    norm = module.norm
    if not isinstance(norm, BatchNorm):
        return norm(x)
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    return x * scale + (norm.bias - norm.running_mean * scale)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def rotated(x: Tensor, rotary: Rotary, first: int = 0) -> Tensor:
    """Apply rotary embedding to (B, heads, T, D), whose places count from ``first``.

    They are those of every utterance, as padding is at the end.
    """
    half = rotary.rotated(x.shape[-1]) // 2
    if not half:
        return x
    rates = torch.tensor([rotary.base ** (-c / half) for c in range(half)], device=x.device)
    angles = (first + torch.arange(x.shape[2], device=x.device))[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    one, other, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [one * cos - other * sin, other * cos + one * sin]
    return torch.cat([*turned, rest] if rest.shape[-1] else turned, -1)


def _heads_qkv(module: SelfAttention, x: Tensor) -> tuple[Tensor, ...]:
    return tuple(_split(part, module.heads) for part in module.qkv_proj(x).chunk(3, -1))


def _heads_kv(module: CrossAttention, x: Tensor) -> tuple[Tensor, ...]:
    return tuple(_split(part, module.heads) for part in module.kv_proj(x).chunk(2, -1))


def _split(x: Tensor, heads: int) -> Tensor:
    """Reshape (B, T, heads * D) to (B, heads, T, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _joined(module: SelfAttention | CrossAttention, x: Tensor) -> Tensor:
    """Reshape (B, heads, T, D) to (B, T, width)."""
    return module.o_proj(x.transpose(1, 2).flatten(2))


def _mask(lengths: Tensor, rows: int) -> Tensor:
    """Which rows are real: bool (B, rows)."""
    return torch.arange(rows, device=lengths.device) < lengths[:, None]
