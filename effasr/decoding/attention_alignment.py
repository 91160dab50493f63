"""Alignment of tokens to frames by the cross-attention of a decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from effasr.decoding.confidence.tokens import likeliest_frames
from effasr.decoding.ctc_alignment import Span, pack_like
from effasr.model.asr import ASRModel
from effasr.model.decoder import DecoderConfig
from effasr_kernels import PackedSequence

_SMOOTHING_SECONDS = 0.14  # of the median over time, as Whisper's, of 7 frames of 20 ms


def align_by_attention(
    model: ASRModel,
    encoded: PackedSequence,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> list[list[Span] | None]:
    """Return the frame of each token of each text, in order; None without a frame.

    The decoder reads the texts. Each token has one row of attention to the frames, where it is
    predicted, and the end has one. Rows of each head are normalised over the tokens, smoothed, and
    averaged over the heads that are known to follow the speech, or those of the upper half of the
    layers, as https://github.com/openai/whisper does (timing.py). Dynamic time warping gives each
    frame to one token, in order, with the largest sum. A token has the frame of the highest weight
    of its own: the first one may begin with the silence before it.
    """
    features = model.config.features
    frame_seconds = features.framing.samples / features.sample_rate
    return [
        _spans(weights, frame_seconds)
        for weights in alignment_weights(model, encoded, prompts, texts)
    ]


@torch.no_grad()
def alignment_weights(
    model: ASRModel,
    encoded: PackedSequence,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> Iterator[Tensor]:
    """Yield the attention of heads to T frames, where U tokens and the end are predicted.

    It is float64 (heads, U + 1, T), for each text.
    """
    decoder = model.decoder
    assert decoder is not None
    layers, heads = decoder.decoder_layers(), _heads(decoder.config)
    queries: dict[int, Tensor] = {}
    speech: dict[int, Tensor] = {}

    def capture(layer: int, _: Any, inputs: tuple[Tensor, ...]) -> None:
        queries[layer], speech[layer] = inputs[0], inputs[2]

    pairs = list(zip(prompts, texts, strict=True))
    tokens = pack_like([[*prompt, *text] for prompt, text in pairs], encoded)
    hooks = [
        layers[layer].encoder_attn.register_forward_pre_hook(partial(capture, layer))
        for layer in {layer for layer, _ in heads}
    ]
    try:
        model.decode(tokens, encoded)
    finally:
        for hook in hooks:
            hook.remove()
    begins, frames = tokens.layout.cu_seqlens_host, encoded.layout.cu_seqlens_host
    for number, (prompt, text) in enumerate(pairs):
        first = begins[number] + len(prompt) - 1
        rows = slice(first, first + len(text) + 1)
        own = slice(frames[number], frames[number + 1])
        weights = {
            layer: layers[layer].encoder_attn.head_weights(queries[layer][rows], speech[layer][own])
            for layer in queries
        }
        yield torch.stack([weights[layer][head] for layer, head in heads])


def _heads(config: DecoderConfig) -> tuple[tuple[int, int], ...]:
    upper = range(config.layers // 2, config.layers)
    return config.alignment_heads or tuple((n, h) for n in upper for h in range(config.heads))


def _spans(weights: Tensor, frame_seconds: float) -> list[Span] | None:
    """Return the frames of each token by attention of heads, (H, U + 1, T)."""
    _, rows, frames = weights.shape
    if not frames:
        return None
    mean, std = weights.mean(1, keepdim=True), weights.std(1, correction=0, keepdim=True)
    matrix = _smoothed((weights - mean) / (std + 1e-9), frame_seconds).mean(0).cpu().numpy()
    # The frames of a row end where the next row's begin.
    ends = likeliest_frames(matrix.T, np.zeros((frames, rows - 1)))
    if ends is None:
        return None
    spans, begin = [], 0
    for row, end in enumerate(ends):
        peak = begin + int(matrix[row, begin : max(end, begin + 1)].argmax())
        spans.append((peak, peak + 1))
        begin = end
    return spans


def _smoothed(weights: Tensor, frame_seconds: float) -> Tensor:
    side = round(_SMOOTHING_SECONDS / frame_seconds) // 2
    if not side:
        return weights
    padded = torch.nn.functional.pad(weights, (side, side), mode="reflect")
    return padded.unfold(2, 2 * side + 1, 1).median(-1).values
