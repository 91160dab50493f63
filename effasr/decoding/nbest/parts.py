"""Parts of the scores of hypotheses, which the weights of a search combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from effasr.decoding.config import LM_WEIGHT, DecodingConfig
from effasr.decoding.decoded import Decoded, with_scores
from effasr.decoding.lm.ngram import TokenLM
from effasr.decoding.lm.texts import log_probs_of_texts
from effasr.decoding.nbest.hypothesis import Hypothesis, ScoreParts
from effasr.model.asr import ASRModel
from effasr_kernels import PackedSequence


@torch.no_grad()
def with_parts(
    model: ASRModel,
    method: str,
    encoded: PackedSequence,
    prompts: Sequence[Sequence[int]],
    decoded: Sequence[Decoded],
    config: DecodingConfig,
    lm: TokenLM | None,
    eos_id: int,
) -> list[Decoded]:
    """Add the parts of the scores of all alternatives, by one forward for each place of the lists.

    Args:
        model: The model, in evaluation mode.
        method: ``attention``, ``ctc`` or ``transducer``.
        encoded: (T, C), from ``model.encode``; sequences past ``len(decoded)`` are ignored.
        prompts: Tokens that the decoder reads first.
        decoded: Results with at least one alternative each.
        config: The configuration of the search, whose scores are divided.
        lm: Its language model over tokens, if any.
        eos_id: The end token.
    """
    found: list[list[Hypothesis]] = [[] for _ in decoded]
    for place in range(max((len(one.alternatives) for one in decoded), default=0)):
        # An utterance with fewer alternatives is scored again with its last one, and not listed.
        column = [one.alternatives[min(place, len(one.alternatives) - 1)] for one in decoded]
        parts = _parts(model, method, encoded, prompts, column, config, lm, eos_id)
        for own, one, hypothesis, divided in zip(found, decoded, column, parts, strict=True):
            if place < len(one.alternatives):
                own.append(replace(hypothesis, parts=divided))
    pairs = zip(decoded, found, strict=True)
    return [replace(one, alternatives=tuple(own)) for one, own in pairs]


def _parts(
    model: ASRModel,
    method: str,
    encoded: PackedSequence,
    prompts: Sequence[Sequence[int]],
    hypotheses: Sequence[Hypothesis],
    config: DecodingConfig,
    lm: TokenLM | None,
    eos_id: int,
) -> list[ScoreParts]:
    """Divide the score of one hypothesis of each utterance."""
    texts = [one.tokens for one in hypotheses]
    written = None if lm is None else log_probs_of_texts(lm, texts)
    weight = LM_WEIGHT if config.lm_weight is None else config.lm_weight

    def by(name: str) -> list[float]:
        plain = [Decoded(text) for text in texts]
        scored = with_scores(model, name, encoded, prompts, plain, eos_id)
        return [one.score.log_prob for one in scored if one.score is not None]

    heard = None
    if method == "attention":
        own = by("attention")
        heard = by("ctc") if model.config.ctc else None
    else:
        # The search has summed over the alignments in its beam: what it ranks by is that sum.
        added = [0.0] * len(texts) if written is None else [weight * x for x in written]
        own = [one.score - more for one, more in zip(hypotheses, added, strict=True)]
    return [
        ScoreParts(
            own[n],
            None if heard is None else heard[n],
            None if written is None else written[n],
            len(text) + 1,
        )
        for n, text in enumerate(texts)
    ]
