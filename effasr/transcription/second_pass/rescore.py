"""Choice among the alternatives of segments by a second language model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from effasr.model.checks import check
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
        check(
            self.context_segments >= 0, "context_segments", "be at least 0", self.context_segments
        )

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
        longest = max(
            (len(one.segments) for one in group if isinstance(one, Transcription)), default=0
        )
        for number in range(longest):
            places = [
                place
                for place, one in enumerate(group)
                if isinstance(one, Transcription) and number < len(one.segments)
            ]
            segments = [_segment(group[place], number) for place in places]
            befores = [self._before(group[place], chosen[place]) for place in places]
            found = self._chosen(segments, befores)
            for place, segment in zip(places, found, strict=True):
                chosen[place].append(segment)
        return [
            _with_segments(one, own) if isinstance(one, Transcription) else one
            for one, own in zip(group, chosen, strict=True)
        ]

    def _before(self, result: Result, chosen: Sequence[Segment]) -> str:
        assert isinstance(result, Transcription)
        last = chosen[max(0, len(chosen) - self.context_segments) :]
        return result.space.join(one.text for one in last if one.text)

    def _chosen(self, segments: Sequence[Segment], befores: Sequence[str]) -> list[Segment]:
        # Different tokens may spell the same text, which is scored once.
        texts = [
            list(dict.fromkeys(one.text for one in segment.alternatives)) for segment in segments
        ]
        pairs = [(before, text) for before, own in zip(befores, texts, strict=True) for text in own]
        scores = iter(self.scorer.log_probs(pairs))
        found = []
        for segment, own in zip(segments, texts, strict=True):
            of_text = dict(zip(own, islice(scores, len(own)), strict=True))
            found.append(self._ranked(segment, of_text))
        return found

    def _ranked(self, segment: Segment, of_text: dict[str, float]) -> Segment:
        ranked = []
        for one in segment.alternatives:
            written = of_text[one.text]
            rank = one.score + self.lm_weight * written + self.word_bonus * len(one.text.split())
            ranked.append(replace(one, rank=rank, lm_score=written))
        if not ranked:
            return segment
        # Of equal ranks the text decides, so that the order of the list does not matter.
        ranked.sort(key=lambda one: (-one.rank, one.text, -one.score))
        return replace(segment, text=ranked[0].text, alternatives=tuple(ranked))


def _segment(result: Result, number: int) -> Segment:
    assert isinstance(result, Transcription)
    return result.segments[number]


def _with_segments(result: Transcription, segments: Sequence[Segment]) -> Transcription:
    text = result.space.join(one.text for one in segments if one.text)
    return replace(result, text=text, segments=tuple(segments))
