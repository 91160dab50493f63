"""Result of a search, and what a configuration requests beside it: scores, parts, confidences."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from effasr.data.batch import IGNORED
from effasr.data.features.segments import segment_sum
from effasr.decoding.confidence.tokens import likeliest_frames, token_confidences
from effasr.decoding.config import DecodingConfig
from effasr.decoding.ctc_alignment import Span, align_tokens, pack_like
from effasr.decoding.hypothesis import Hypothesis, ScoreParts
from effasr.decoding.lm.ngram import TokenLM
from effasr.model.asr import ASRModel
from effasr.model.decoder import DecoderConfig
from effasr_kernels import PackedSequence, ctc_loss, linear_cross_entropy

# Alignment of tokens to frames by the cross-attention of a decoder.

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


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probability that a model gives to a transcript."""

    log_prob: float  # nats, of the whole transcript
    symbols: int  # the tokens, and the end token, if the method has one; at least 1

    def of_tokens(self, count: int) -> "Score":
        """Return the score of some of the tokens if all were equally likely."""
        return Score(self.log_prob / self.symbols * count, count)


@dataclass(frozen=True, slots=True)
class TimedPart:
    """Tokens ``first:last`` of a text, between two timestamps."""

    start: float  # seconds from the beginning of the audio
    end: float | None  # None where the text stops before it
    first: int
    last: int
    tokens: tuple[int, ...]  # with their timestamps


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """Encoder output, and what scores its transcripts."""

    model: ASRModel
    method: str
    encoded: PackedSequence
    prompts: Sequence[Sequence[int]]
    eos_id: int


@dataclass(frozen=True, slots=True)
class Decoded:
    tokens: tuple[int, ...]  # without prompt and end token
    truncated: bool = False  # whether the decoder reached its limit before the end token
    spans: tuple[Span, ...] | None = None  # None if not requested, or if there are too few frames
    score: Score | None = None  # by the model, if requested
    # The best hypotheses of the search, this one first, if requested. Of greedy search, this one
    # alone, with its score by the model.
    alternatives: tuple[Hypothesis, ...] = ()
    # Of each token, from 0 to 1; None if not requested, or if no path spells the transcript.
    confidences: tuple[float, ...] | None = None
    parts: tuple[TimedPart, ...] = ()  # by timestamps, which ``tokens`` are without, if requested


@torch.no_grad()
def with_details(
    batch: EncodedBatch, decoded: Sequence[Decoded], config: DecodingConfig
) -> list[Decoded]:
    """Add the scores, alternatives, confidences and spans that a configuration requests."""
    results, model, encoded = list(decoded), batch.model, batch.encoded
    listed = config.nbest is not None and not all(result.alternatives for result in results)
    if config.confidence or listed:
        results = with_scores(batch, results)
    if listed:
        results = [_listed(result) for result in results]
    if listed and not config.confidence:
        results = [replace(result, score=None) for result in results]
    texts = [result.tokens for result in results]
    if config.word_confidence:
        confidences = token_confidences(model, batch.method, encoded, batch.prompts, texts)
        pairs = zip(results, confidences, strict=True)
        results = [replace(result, confidences=values) for result, values in pairs]
    if not config.wants_words:
        return results
    if model.config.ctc:
        aligned = align_tokens(model, encoded, texts)
    elif batch.method == "transducer":
        return results
    else:
        aligned = align_by_attention(model, encoded, batch.prompts, texts)
    # Without a CTC path, those of a transducer's search stay.
    return [
        result if spans is None else replace(result, spans=tuple(spans))
        for result, spans in zip(results, aligned, strict=True)
    ]


def _listed(result: Decoded) -> Decoded:
    """Return a transcript with itself as the only alternative, if it has none."""
    if result.alternatives:
        return result
    assert result.score is not None
    log_prob = result.score.log_prob
    return replace(result, alternatives=(Hypothesis(result.tokens, log_prob, log_prob),))


@torch.no_grad()
def with_scores(batch: EncodedBatch, decoded: Sequence[Decoded]) -> list[Decoded]:
    """Add the score of each transcript, whatever search has made it.

    With ``attention`` it is the decoder's, of the tokens and the end; with ``ctc`` and
    ``transducer``, the sum over all alignments. A language model has no part in it.
    """
    texts, model, encoded = [result.tokens for result in decoded], batch.model, batch.encoded
    if batch.method == "attention":
        losses, ends = _attention_loss(batch, texts), 1
    elif batch.method == "transducer":
        assert model.transducer is not None
        losses, ends = model.transducer(encoded, pack_like(texts, encoded)), 1
    else:
        assert model.ctc_head is not None
        text, ends = pack_like(texts, encoded), 0
        losses = ctc_loss(
            encoded.values,
            model.ctc_head.weight,
            text.values,
            encoded.layout,
            text.layout,
            bias=model.ctc_head.bias,
            blank_id=model.vocab_size,
        )
    return [
        replace(result, score=Score(-loss, max(1, len(result.tokens) + ends)))
        for result, loss in zip(decoded, losses.tolist(), strict=False)
    ]


def _attention_loss(batch: EncodedBatch, texts: Sequence[Sequence[int]]) -> Tensor:
    encoded, decoder = batch.encoded, batch.model.decoder
    assert decoder is not None
    pairs = list(zip(batch.prompts, texts, strict=True))
    tokens = pack_like([[*prompt, *text] for prompt, text in pairs], encoded)
    targets = [[*[IGNORED] * (len(prompt) - 1), *text, batch.eos_id] for prompt, text in pairs]
    hidden, _ = batch.model.decode(tokens, encoded)
    values = pack_like(targets, encoded).values
    loss = linear_cross_entropy(hidden, decoder.output_weight, values, bias=decoder.output_bias)
    return segment_sum(loss, tokens.layout)


@torch.no_grad()
def with_parts(
    batch: EncodedBatch, decoded: Sequence[Decoded], lm_weight: float, lm: TokenLM | None
) -> list[Decoded]:
    """Add the parts of the scores of all alternatives, by a forward for each column of lists."""
    lists: list[list[Hypothesis]] = [[] for _ in decoded]
    for index in range(max((len(result.alternatives) for result in decoded), default=0)):
        # An utterance with fewer alternatives is scored again with its last one, and not listed.
        column = [
            result.alternatives[min(index, len(result.alternatives) - 1)] for result in decoded
        ]
        parts = _score_parts(batch, column, lm_weight, lm)
        for divided, result, hypothesis, part in zip(lists, decoded, column, parts, strict=True):
            if index < len(result.alternatives):
                divided.append(replace(hypothesis, parts=part))
    pairs = zip(decoded, lists, strict=True)
    return [replace(result, alternatives=tuple(divided)) for result, divided in pairs]


def _score_parts(
    batch: EncodedBatch, hypotheses: Sequence[Hypothesis], lm_weight: float, lm: TokenLM | None
) -> list[ScoreParts]:
    """Divide the score of one hypothesis of each utterance."""
    texts = [hypothesis.tokens for hypothesis in hypotheses]
    of_lm = None if lm is None else log_probs_of_texts(lm, texts)

    def log_probs(head: str) -> list[float]:
        plain = [Decoded(text) for text in texts]
        scored = with_scores(replace(batch, method=head), plain)
        return [result.score.log_prob for result in scored if result.score is not None]

    of_ctc = None
    if batch.method == "attention":
        of_model = log_probs("attention")
        of_ctc = log_probs("ctc") if batch.model.config.ctc else None
    else:
        # The search has summed over the alignments in its beam: what it ranks by is that sum.
        added = [0.0] * len(texts) if of_lm is None else [lm_weight * x for x in of_lm]
        of_model = [item.score - lm_score for item, lm_score in zip(hypotheses, added, strict=True)]
    return [
        ScoreParts(
            of_model[n],
            None if of_ctc is None else of_ctc[n],
            None if of_lm is None else of_lm[n],
            len(text) + 1,
        )
        for n, text in enumerate(texts)
    ]


def log_probs_of_texts(lm: TokenLM, texts: Sequence[Sequence[int]]) -> list[float]:
    """Return the log-probability of each text and its end, in nats, as shallow fusion adds it."""
    longest = max(map(len, texts), default=0)
    length = max(1, min(lm.order, longest))
    contexts, symbols = [], []
    for text in texts:
        for count in range(len(text) + 1):
            context = text[max(0, count - length) : count]
            contexts.append([*[-1] * (length - len(context)), *context])
            # After the last token only the end is scored, whatever the symbol.
            symbols.append([text[count] if count < len(text) else 0])
    if not texts:
        return []
    scores = lm.scores(torch.tensor(contexts)[:, None], torch.tensor(symbols)[:, None])
    rows = iter(scores[:, 0].tolist())
    totals = []
    for text in texts:
        total = sum(next(rows)[0] for _ in text)
        totals.append(total + next(rows)[1])
    return totals
