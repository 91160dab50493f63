"""N-best lists of a set, from which transcripts are chosen by any weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from effasr.decoding.config import DecodingConfig
from effasr.evaluation.tuning.weights import Weights
from effasr.evaluation.wer import ErrorCounts, count_errors
from effasr.transcription.results import Alternative, Segment, Transcription

_CORRECTED, _RECOGNIZED = -1, -2
"""Choices between the text of a corrector and that of the search."""

_COLUMNS = "model", "ctc", "lm", "symbols", "second", "words"


class NBestLists:
    """The scores of all alternatives by part, and the errors of the chosen ones.

    Args:
        utterances: References and transcripts, whose alternatives have parts.
        config: The configuration that they were decoded with.
        weights: Its weights.
        normalize: Of references and texts, before they are compared.
    """

    def __init__(
        self,
        utterances: Sequence[tuple[str, Transcription]],
        config: DecodingConfig,
        weights: Weights,
        normalize: Callable[[str], str],
    ) -> None:
        self._normalize = normalize
        self._references = [normalize(reference) for reference, _ in utterances]
        self._results = [result for _, result in utterances]
        self._second = config.second_lm is not None
        self._gains: np.ndarray | None = None
        if config.corrector is not None:
            found = [segment.correction for one in self._results for segment in one.segments]
            gains = [-math.inf if one is None else one.gain for one in found]
            self._gains = np.array(gains, dtype=np.float64)
        lists = [segment.alternatives for one in self._results for segment in one.segments]
        self.size = max(map(len, lists), default=0)
        shape = len(lists), self.size
        self._parts = {name: np.zeros(shape) for name in _COLUMNS}
        self._missing, self._rest = np.ones(shape, dtype=bool), np.zeros(shape)
        ranks = np.zeros(shape)
        # A corrector replaces the text that the weights have chosen: these stay.
        for row, alternatives in enumerate([] if self._gains is not None else lists):
            for place, one in enumerate(alternatives):
                for name, value in _row(one).items():
                    self._parts[name][row, place] = value
                self._missing[row, place] = False
                ranks[row, place] = one.rank
        # What the weights do not explain, such as coverage.
        self._rest = np.where(self._missing, 0.0, ranks - self._ranks(weights))
        self._counts: dict[tuple[int, str], ErrorCounts] = {}
        self._chosen: dict[bytes, tuple[tuple[ErrorCounts, ...], np.ndarray]] = {}
        self._seen: dict[Weights, bytes] = {}

    @property
    def utterances(self) -> int:
        """Number of utterances."""
        return len(self._results)

    def _ranks(self, weights: Weights) -> np.ndarray:
        """Return the ranks of all alternatives, float64 (segments, alternatives)."""
        parts, share = self._parts, weights.ctc_weight
        scores = _times(1 - share, parts["model"]) + _times(share, parts["ctc"])
        scores = scores + _times(weights.lm_weight, parts["lm"])
        if self._second:
            scores = scores + _times(weights.second_lm_weight, parts["second"])
            return scores + weights.second_word_bonus * parts["words"] + self._rest
        return scores / ((5 + parts["symbols"]) / 6) ** weights.length_penalty + self._rest

    def choices(self, weights: Weights) -> np.ndarray:
        """Return the place of the best alternative of each segment, int64 (segments,).

        With a corrector it is `_CORRECTED` or `_RECOGNIZED`.
        """
        if self._gains is not None:
            chosen = self._gains > weights.corrector_margin
            return np.where(chosen, _CORRECTED, _RECOGNIZED)
        if not self.size:
            return np.zeros(len(self._missing), dtype=np.int64)
        return np.where(self._missing, -np.inf, self._ranks(weights)).argmax(axis=1)

    def errors(self, weights: Weights) -> tuple[ErrorCounts, ...]:
        """Return the errors of each utterance, if these weights choose."""
        return self._found(weights)[0]

    def word_errors(self, weights: Weights) -> np.ndarray:
        """Return the word errors of each utterance, likewise, int64 (utterances,)."""
        return self._found(weights)[1]

    def tried(self) -> np.ndarray:
        """Return the word errors of all different choices so far, int64 (choices, utterances)."""
        return np.stack([words for _, words in self._chosen.values()])

    def _found(self, weights: Weights) -> tuple[tuple[ErrorCounts, ...], np.ndarray]:
        # Most weights choose as others do.
        if weights not in self._seen:
            chosen = self.choices(weights)
            key = self._seen[weights] = chosen.tobytes()
            if key not in self._chosen:
                errors = self._errors(chosen.tolist())
                words = np.array([one.errors for one in errors], dtype=np.int64)
                self._chosen[key] = errors, words
        return self._chosen[self._seen[weights]]

    def _errors(self, choices: Sequence[int]) -> tuple[ErrorCounts, ...]:
        found, row = [], 0
        for number, one in enumerate(self._results):
            own = choices[row : row + len(one.segments)]
            row += len(own)
            pairs = zip(one.segments, own, strict=True)
            texts = [_text(segment, choice) for segment, choice in pairs]
            found.append(self._count(number, one.space.join(text for text in texts if text)))
        return tuple(found)

    def _count(self, number: int, text: str) -> ErrorCounts:
        key = number, text
        if key not in self._counts:
            self._counts[key] = count_errors(self._references[number], self._normalize(text))
        return self._counts[key]

    def oracle(self) -> tuple[ErrorCounts, ...]:
        """Return the errors of each utterance, if the best of its alternatives were chosen."""
        return tuple(
            min(
                (self._count(number, text) for text in {one.text for one in result.alternatives}),
                key=lambda counts: counts.errors,
                default=self._count(number, result.text),
            )
            for number, result in enumerate(self._results)
        )


def _text(segment: Segment, choice: int) -> str:
    """Return the text of a choice."""
    correction = segment.correction
    if choice >= 0:
        return segment.alternatives[choice].text if segment.alternatives else segment.text
    if correction is None:
        return segment.text
    return correction.written if choice == _CORRECTED else correction.recognized


def _row(one: Alternative) -> dict[str, float]:
    assert one.parts is not None
    parts = one.parts
    return {
        "model": parts.model,
        "ctc": parts.ctc or 0.0,
        "lm": parts.lm or 0.0,
        "symbols": parts.symbols,
        "second": one.lm_score or 0.0,
        "words": len(one.text.split()),
    }


def _times(weight: float, values: np.ndarray) -> np.ndarray | float:
    """Return the product; 0 for a weight of 0, also of an impossible transcript."""
    return weight * values if weight else 0.0
