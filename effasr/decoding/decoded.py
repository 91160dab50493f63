"""Result of a search, and its score by the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from effasr.data.batch import IGNORED
from effasr.data.features.segments import segment_sum
from effasr.decoding.confidence.tokens import token_confidences
from effasr.decoding.config import DecodingConfig
from effasr.decoding.ctc_alignment import Span, align_tokens
from effasr.decoding.nbest.hypothesis import Hypothesis
from effasr.model.asr import ASRModel
from effasr_kernels import PackedLayout, PackedSequence, ctc_loss, linear_cross_entropy


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probability that a model gives to a transcript.

    Attributes:
        log_prob: Nats, of the whole transcript.
        symbols: Symbols over which it is averaged: the tokens, and the end token, if the method has
            one; at least 1.
    """

    log_prob: float
    symbols: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """Transcript of one utterance.

    Attributes:
        tokens: Token ids without prompt and end token.
        truncated: Whether the decoder reached its limit before the end token.
        spans: Encoder frames of each token; None if not requested, or if there are too few frames.
        score: Score by the model; None if not requested.
        confidences: Confidence of each token, from 0 to 1; None if not requested, or if no path of
            the model spells the transcript.
        alternatives: The best hypotheses of the search, this one first; none if not requested. Of
            greedy search, this one alone, with its score by the model.
    """

    tokens: tuple[int, ...]
    truncated: bool = False
    spans: tuple[Span, ...] | None = None
    score: Score | None = None
    alternatives: tuple[Hypothesis, ...] = ()
    confidences: tuple[float, ...] | None = None


@torch.no_grad()
def with_details(
    model: ASRModel,
    method: str,
    encoded: PackedSequence,
    prompts: Sequence[Sequence[int]],
    decoded: Sequence[Decoded],
    config: DecodingConfig,
    eos_id: int,
) -> list[Decoded]:
    """Add the scores, alternatives, confidences and spans that a configuration requests.

    Args:
        model: The model, in evaluation mode.
        method: ``attention``, ``ctc`` or ``transducer``.
        encoded: (T, C), from ``model.encode``; sequences past ``len(decoded)`` are ignored.
        prompts: Tokens that the decoder reads first.
        decoded: Transcripts of the sequences.
        config: The configuration of the search.
        eos_id: The end token.
    """
    results = list(decoded)
    listed = config.nbest is not None and not all(one.alternatives for one in results)
    if config.confidence or listed:
        results = with_scores(model, method, encoded, prompts, results, eos_id)
    if listed:
        results = [_with_itself(one) for one in results]
    if listed and not config.confidence:
        results = [replace(one, score=None) for one in results]
    texts = [one.tokens for one in results]
    if config.word_confidence:
        sure = token_confidences(model, method, encoded, prompts, texts)
        pairs = zip(results, sure, strict=True)
        results = [replace(one, confidences=found) for one, found in pairs]
    if not config.words:
        return results
    spans = align_tokens(model, encoded, texts)
    return [
        replace(one, spans=None if found is None else tuple(found))
        for one, found in zip(results, spans, strict=True)
    ]


def _with_itself(one: Decoded) -> Decoded:
    """Return a transcript with itself as the only alternative, if it has none."""
    if one.alternatives:
        return one
    assert one.score is not None
    log_prob = one.score.log_prob
    return replace(one, alternatives=(Hypothesis(one.tokens, log_prob, log_prob),))


@torch.no_grad()
def with_scores(
    model: ASRModel,
    method: str,
    encoded: PackedSequence,
    prompts: Sequence[Sequence[int]],
    decoded: Sequence[Decoded],
    eos_id: int,
) -> list[Decoded]:
    """Add the score of each transcript, whatever search has found it.

    With ``attention`` it is the decoder's, of the tokens and the end; with ``ctc`` and
    ``transducer``, the sum over all alignments. A language model has no part in it.

    Args:
        model: The model, in evaluation mode.
        method: One of these three.
        encoded: (T, C), from ``model.encode``; sequences past ``len(decoded)`` are not scored.
        prompts: Tokens that the decoder reads first.
        decoded: Transcripts of the sequences.
        eos_id: The end token.
    """
    texts = [list(one.tokens) for one in decoded]
    if method == "attention":
        losses, ends = _attention_loss(model, encoded, prompts, texts, eos_id), 1
    else:
        text = _packed(texts, encoded)
        losses, ends = _alignment_loss(model, method, encoded, text), int(method != "ctc")
    return [
        replace(one, score=Score(-loss, max(1, len(one.tokens) + ends)))
        for one, loss in zip(decoded, losses.tolist(), strict=False)
    ]


def _attention_loss(
    model: ASRModel,
    encoded: PackedSequence,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[list[int]],
    eos_id: int,
) -> Tensor:
    """Return the cross-entropy of each transcript and its end, (N,)."""
    pairs = list(zip(prompts, texts, strict=True))
    tokens = _packed([[*prompt, *text] for prompt, text in pairs], encoded)
    targets = [[IGNORED] * (len(prompt) - 1) + text + [eos_id] for prompt, text in pairs]
    hidden, _ = model.decode(tokens, encoded)
    assert model.decoder is not None
    loss = linear_cross_entropy(
        hidden,
        model.decoder.output_weight,
        _packed(targets, encoded).values,
        bias=model.decoder.output_bias,
    )
    return segment_sum(loss, tokens.layout)


def _alignment_loss(
    model: ASRModel, method: str, encoded: PackedSequence, text: PackedSequence
) -> Tensor:
    """Return the loss of each transcript over its alignments, (N,)."""
    if method == "transducer":
        assert model.transducer is not None
        return model.transducer(encoded, text)
    assert model.ctc_head is not None
    return ctc_loss(
        encoded.values,
        model.ctc_head.weight,
        text.values,
        encoded.layout,
        text.layout,
        bias=model.ctc_head.bias,
        blank_id=model.vocab_size,
    )


def _packed(sequences: Sequence[Sequence[int]], like: PackedSequence) -> PackedSequence:
    """Pack token ids into as many sequences as those of ``like``, on its device."""
    device, count = like.values.device, like.layout.num_sequences
    layout = PackedLayout.from_lengths(list(map(len, sequences)), device, num_sequences=count)
    flat = [token for sequence in sequences for token in sequence]
    return PackedSequence(torch.tensor(flat, dtype=torch.int64, device=device), layout)
