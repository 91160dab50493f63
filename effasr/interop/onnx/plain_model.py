"""The model over padded batches in plain PyTorch, whole and step by step, for export.

Functions and weights are those of `effasr.model` in evaluation mode; only the layout differs, and
caches and states are inputs and outputs. Speed does not matter here.
"""

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.model.asr import ASRModel
from effasr.model.decoder import Decoder, DecoderLayer
from effasr.model.encoder import FastConformerEncoder
from effasr.model.streaming_encoder import (
    EncoderStep,
    StreamCaches,
    conformer,
    layer_input,
    normalized,
    rotated,
    subsampled,
)
from effasr.model.transducer import Transducer
from effasr.model.whisper_encoder import WhisperEncoder
from effasr.nn.attention import CrossAttention, RelativeSelfAttention, SelfAttention
from effasr.nn.convolution import ConformerConvolution
from effasr.nn.positions import relative_sinusoids
from effasr.nn.predictor import LSTMPredictor, PredictorState, StatelessPredictor
from effasr.nn.transformer_layer import TransformerLayer
from effasr_kernels import Context


class _Heads(nn.Module):
    """What CTC and a transducer make of the encoder output."""

    def __init__(self, model: ASRModel):
        super().__init__()
        self.mel_bins = model.config.features.mel_bins
        self.ctc_head, head = model.ctc_head, model.transducer
        self.transducer_projection = None if head is None else head.encoder_projection
        self.heads = ["ctc_log_probs"] * model.config.ctc
        self.heads += ["encoder_projected"] * (head is not None)

    def of(self, encoded: Tensor) -> list[Tensor]:
        outputs = []
        if self.ctc_head is not None:
            outputs.append(self.ctc_head(encoded).log_softmax(-1))
        if self.transducer_projection is not None:
            outputs.append(self.transducer_projection(encoded))
        return outputs


class PaddedEncoder(_Heads):
    """Encoder, and everything that the other parts compute once from its output."""

    def __init__(self, model: ASRModel):
        super().__init__(model)
        self.encoder, self.projection, self.decoder = model.encoder, model.projection, model.decoder
        cross = [] if model.decoder is None else ["cross_keys", "cross_values"]
        self.outputs = ["encoded", "encoded_lengths", *cross, *self.heads]

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        # features: float32 (B, T, mel_bins), from `effasr.data.features.log_mel.LogMel` for each
        # utterance, followed by arbitrary rows; lengths: int64 (B,), real rows of each, at least
        # one -> (B, T / subsampling rounded up, width), int64 (B,), (layers, B, heads, frames,
        # head_dim), (B, frames, V + 1), (B, frames, J)
        if isinstance(self.encoder, WhisperEncoder):
            x, lengths = _whisper(self.encoder, features, lengths)
        else:
            assert isinstance(self.encoder, FastConformerEncoder)
            x, lengths = _fastconformer(self.encoder, features, lengths)
        outputs = [x, lengths]
        if self.decoder is not None:
            projected = x if self.projection is None else self.projection(x)
            layers = [cast(DecoderLayer, layer) for layer in self.decoder.layers]
            pairs = [_heads_kv(layer.encoder_attn, projected) for layer in layers]
            outputs += [torch.stack([pair[which] for pair in pairs]) for which in (0, 1)]
        return (*outputs, *self.of(x))


class PaddedDecoderStep(nn.Module):
    """Decoder step for one token per utterance, all at the same position."""

    def __init__(self, model: ASRModel):
        super().__init__()
        self.decoder = cast(Decoder, model.decoder)
        # Not the table of embeddings, even where the model shares it: onnxruntime's
        # quantize_dynamic turns the weight of a product, and with it what else reads it.
        weight = self.decoder.output_weight.detach().t().contiguous().clone()
        self.output_weight = nn.Parameter(weight, requires_grad=False)

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
        mask = _mask(encoded_lengths, cross_keys.shape[3])[:, None, None]
        keys, values = [], []
        for number, module in enumerate(decoder.layers):
            layer = cast(DecoderLayer, module)
            q, k, v = _heads_qkv(layer.self_attn, layer.input_layernorm(x))
            k = torch.cat([past_keys[number], k], 2)
            v = torch.cat([past_values[number], v], 2)
            keys.append(k)
            values.append(v)
            x = x + _joined(layer.self_attn, _attend(q, k, v))
            attention = layer.encoder_attn
            q = _split(attention.q_proj(layer.post_attention_layernorm(x)), attention.heads)
            y = _attend(q, cross_keys[number], cross_values[number], mask)
            x = x + _joined(attention, y)
            x = x + layer.mlp(layer.final_layernorm(x))
        logits = torch.matmul(decoder.norm(x[:, 0]), self.output_weight)
        if decoder.output_bias is not None:
            logits = logits + decoder.output_bias
        return logits, torch.stack(keys), torch.stack(values)


def _fastconformer(
    encoder: FastConformerEncoder, x: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Map (B, T, mel_bins) to (B, T / subsampling, width)."""
    begin = torch.zeros_like(lengths)
    x, lengths = subsampled(encoder.subsampling, x, begin, lengths, causal=False)
    x = encoder.subsampling.linear(x.transpose(1, 2).flatten(2))
    x = layer_input(encoder, x, torch.arange(x.shape[1], device=x.device))
    real = _mask(lengths, x.shape[1])
    for layer in encoder.layers:
        x = conformer(layer, x, partial(_self_attention, real), partial(_convolution, real))
    return x, lengths


def _whisper(encoder: WhisperEncoder, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Map (B, T, mel_bins) to (B, T / 2, width)."""
    stem = encoder.stem
    x = x * _mask(lengths, x.shape[1])[..., None]
    # If the number of rows is odd, the last row is followed by zeros, as at every end.
    x = F.gelu(stem.conv1(x.mT)) * _mask(lengths, x.shape[1])[:, None]
    x, lengths = F.gelu(stem.conv2(x)).mT, (lengths + 1) // 2
    x = x + encoder.places(torch.arange(x.shape[1], device=x.device))
    real = _mask(lengths, x.shape[1])
    for module in encoder.layers:
        layer = cast(TransformerLayer, module)
        x = x + _self_attention(real, layer.self_attn, layer.norm_self_att(x))
        x = x + layer.feed_forward(layer.norm_feed_forward(x))
    return encoder.norm(x), lengths


def _self_attention(real: Tensor, module: SelfAttention, x: Tensor) -> Tensor:
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


def _convolution(real: Tensor, module: ConformerConvolution, x: Tensor) -> Tensor:
    x = F.glu(module.pointwise1(x), -1) * real[..., None]
    taps = module.depthwise.weight
    x = F.conv1d(
        x.mT, taps[:, None], module.depthwise.bias, padding=taps.shape[1] // 2, groups=taps.shape[0]
    ).mT
    return module.pointwise2(F.silu(normalized(module, x)))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


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


CACHES = ("cache_mel", "cache_keys", "cache_values", "cache_conv", "cache_frames", "cache_missing")
"""Inputs that the outputs ``next_...`` of the step before replace."""
_LAYERED = ("cache_keys", "cache_values", "cache_conv")


class StreamingStep(_Heads):
    """The encoder over the next chunk of each stream, and what CTC or a transducer makes of it."""

    def __init__(self, model: ASRModel, context: Context):
        super().__init__(model)
        self.encoder_step = EncoderStep(
            cast(FastConformerEncoder, model.encoder), self.mel_bins, context
        )
        after = [name.replace("cache", "next") for name in CACHES]
        self.outputs = ["encoded", *self.heads, *after]

    @staticmethod
    def batch_axis(name: str) -> int:
        return 1 if name in _LAYERED else 0

    def begin(self, streams: int) -> dict[str, Tensor]:
        """The caches before the first step: zeros."""
        return dict(zip(CACHES, _stacked(self.encoder_step.begin(streams)), strict=True))

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
        # As `EncoderStep.forward` -> (B, c, width), (B, c, V + 1), (B, c, J)
        keys, values, convolved = cache_keys.unbind(), cache_values.unbind(), cache_conv.unbind()
        caches = StreamCaches(cache_mel, keys, values, convolved, cache_frames, cache_missing)
        x, after = self.encoder_step(features, lengths, frames, caches)
        return (x, *self.of(x), *_stacked(after))


def _stacked(caches: StreamCaches) -> list[Tensor]:
    return [part if isinstance(part, Tensor) else torch.stack(list(part)) for part in caches]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """State of a predictor between labels."""

    description: str  # Meaning of the tensor
    dtype: torch.dtype  # Data type
    shape: tuple[int | None, ...]  # Sizes; None stands for the batch
    initial: int  # Fill value before the first label

    @property
    def batch_axis(self) -> int:
        return self.shape.index(None)

    def begin(self, count: int) -> Tensor:
        sizes = [count if size is None else size for size in self.shape]
        return torch.full(sizes, self.initial, dtype=self.dtype)


class LSTMStep(nn.Module):
    """One more label of each transcript, read by LSTM layers."""

    def __init__(self, head: Transducer):
        super().__init__()
        self.predictor = cast(LSTMPredictor, head.predictor)
        self.projection = head.predictor_projection
        sizes = self.predictor.lstm.layers, None, self.predictor.lstm.width
        self.states = tuple(
            StateTensor(name, torch.float32, sizes, 0) for name in ("hidden state", "cell state")
        )

    def forward(
        self, tokens: Tensor, input_states_1: Tensor, input_states_2: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # tokens: int64 (B,), the blank at first; input_states_1: (layers, B, P), the hidden state;
        # input_states_2: (layers, B, P), the cell -> (B, J)
        x, lstm = self.predictor.embedding(tokens), self.predictor.lstm
        hidden, cells = [], []
        for layer in range(lstm.layers):
            w_ih, w_hh, b_ih, b_hh = lstm.weights()[4 * layer : 4 * layer + 4]
            gates = F.linear(x, w_ih, b_ih) + F.linear(input_states_1[layer], w_hh, b_hh)
            i, f, g, o = gates.chunk(4, -1)
            cells.append(f.sigmoid() * input_states_2[layer] + i.sigmoid() * g.tanh())
            x = o.sigmoid() * cells[-1].tanh()
            hidden.append(x)
        return self.projection(x), torch.stack(hidden), torch.stack(cells)


class StatelessStep(nn.Module):
    """One more label of each transcript, where only the last few are seen."""

    def __init__(self, head: Transducer):
        super().__init__()
        self.predictor = cast(StatelessPredictor, head.predictor)
        self.projection = head.predictor_projection
        before = self.predictor.context - 1
        state = StateTensor("the labels before, -1 for none", torch.int64, (None, before), -1)
        self.states = (state,) if before else ()

    def forward(self, tokens: Tensor, input_states_1: Tensor | None = None) -> tuple[Tensor, ...]:
        # tokens: int64 (B,), the blank at first; input_states_1: int64 (B, context - 1), the labels
        # before it -> (B, J)
        seen = tokens[:, None]
        if input_states_1 is not None:
            seen = torch.cat([input_states_1, seen], 1)
        embedded = self.predictor.embedding(seen.clamp(min=0)) * (seen >= 0)[..., None]
        predicted = self.projection(F.relu((embedded * self.predictor.taps.T).sum(1)))
        return (predicted,) if input_states_1 is None else (predicted, seen[:, 1:])


class JointStep(nn.Module):
    """The scores of one frame of each utterance, given the labels so far."""

    def __init__(self, head: Transducer):
        super().__init__()
        self.activation, self.output = head.config.activation, head.output
        self.symbols = head.blank_id + 1

    def forward(self, encoder_projected: Tensor, predictor_projected: Tensor) -> tuple[Tensor, ...]:
        # encoder_projected: (B, J), a frame of each utterance; predictor_projected: (B, J), from
        # the predictor -> (B, V + 1), (B, D)
        joint = encoder_projected + predictor_projected
        scores = self.output(joint.relu() if self.activation == "relu" else joint.tanh())
        if scores.shape[-1] == self.symbols:
            return (scores,)
        return scores[:, : self.symbols], scores[:, self.symbols :]


def predictor_step(head: Transducer) -> LSTMStep | StatelessStep:
    return LSTMStep(head) if isinstance(head.predictor, LSTMPredictor) else StatelessStep(head)


def in_model_layout(state: tuple[Tensor, ...]) -> PredictorState:
    """States of a step in the layout of `Transducer.step`, the batch first."""
    return tuple(part.transpose(0, 1) if part.ndim == 3 else part for part in state)
