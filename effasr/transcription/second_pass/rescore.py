"""Choice among the alternatives of segments by a second language model."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

import torch

from effasr.checks import check
from effasr.decoding.config import LM_WEIGHT, DecodingConfig
from effasr.decoding.lm.words import load_word_ngrams
from effasr.transcription.results import Result, Segment, Transcription

_RECORDINGS = 32  # recordings whose segments are scored together


class TextScorer(Protocol):
    """A language model over texts, such as `CausalScorer` and `WordNgrams` of effasr.decoding."""

    def log_probs(self, texts: Sequence[tuple[str, str]]) -> list[float]: ...


@dataclass(frozen=True, slots=True)
class SecondPass:
    """Ranks alternatives by score + lm_weight * log p(text | earlier segments) + bonus * words."""

    scorer: TextScorer
    lm_weight: float  # weight of its log-probability, at least 0
    # Added for each word, which the language model alone would rather leave out.
    word_bonus: float = 0.0
    # Earlier segments of the recording that the model reads, by their chosen texts.
    context_segments: int = 2

    def __post_init__(self) -> None:
        check(self.lm_weight >= 0, "lm_weight", "be at least 0", self.lm_weight)
        count = self.context_segments
        check(count >= 0, "context_segments", "be at least 0", count)

    def results(self, results: Iterable[Result]) -> Iterator[Result]:
        """Choose the texts of recordings, in order; failures stay as they are.

        Recordings are taken some at a time. The first segments of all are scored in one pass, then
        the second ones, as they read what was chosen for the first.
        """
        coming = iter(results)
        while group := list(islice(coming, _RECORDINGS)):
            yield from self._group(group)

    def _group(self, group: Sequence[Result]) -> list[Result]:
        chosen: list[list[Segment]] = [[] for _ in group]
        recordings = [(n, item) for n, item in enumerate(group) if isinstance(item, Transcription)]
        for number in range(max((len(item.segments) for _, item in recordings), default=0)):
            now = [(index, item) for index, item in recordings if number < len(item.segments)]
            segments = self._choose(
                [item.segments[number] for _, item in now],
                [self._context(item, chosen[index]) for index, item in now],
            )
            for (index, _), segment in zip(now, segments, strict=True):
                chosen[index].append(segment)
        return [
            item.with_segments(segments) if isinstance(item, Transcription) else item
            for item, segments in zip(group, chosen, strict=True)
        ]

    def _context(self, result: Transcription, chosen: Sequence[Segment]) -> str:
        last = chosen[max(0, len(chosen) - self.context_segments) :]
        return result.space.join(segment.text for segment in last if segment.text)

    def _choose(self, segments: Sequence[Segment], contexts: Sequence[str]) -> list[Segment]:
        # Different tokens may spell the same text, which is scored once.
        texts = [dict.fromkeys(item.text for item in segment.alternatives) for segment in segments]
        pairs = [
            (context, text)
            for context, of_segment in zip(contexts, texts, strict=True)
            for text in of_segment
        ]
        scores = iter(self.scorer.log_probs(pairs))
        return [
            self._ranked(segment, {text: next(scores) for text in of_segment})
            for segment, of_segment in zip(segments, texts, strict=True)
        ]

    def _ranked(self, segment: Segment, lm_scores: dict[str, float]) -> Segment:
        ranked = []
        for item in segment.alternatives:
            lm_score, bonus = lm_scores[item.text], self.word_bonus * len(item.text.split())
            rank = item.score + self.lm_weight * lm_score + bonus
            ranked.append(replace(item, rank=rank, lm_score=lm_score))
        if not ranked:
            return segment
        # Of equal ranks the text decides, so that the order of the list does not matter.
        ranked.sort(key=lambda item: (-item.rank, item.text, -item.score))
        return replace(segment, text=ranked[0].text, alternatives=tuple(ranked))


def load_second_pass(config: DecodingConfig, device: torch.device) -> SecondPass | None:
    if config.second_lm is None:
        return None
    if config.second_lm.is_dir():
        # Imported here, because transformers takes seconds.
        from effasr.decoding.second_pass.causal_scorer import CausalScorer

        scorer: TextScorer = CausalScorer(config.second_lm, device)
    else:
        scorer = load_word_ngrams(config.second_lm)
    weight = LM_WEIGHT if config.second_lm_weight is None else config.second_lm_weight
    return SecondPass(scorer, weight, config.second_word_bonus or 0.0)
