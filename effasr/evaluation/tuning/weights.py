"""The weights that combine scores, and the search for those with the fewest word errors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np

from effasr.decoding.config import LM_WEIGHT, DecodingConfig
from effasr.evaluation.bootstrap import Counts, chance_of_best, probability_of_improvement
from effasr.model.asr import ASRModel
from effasr.transcription.results import Segment, Transcription

_COLUMNS = "model", "ctc", "lm", "symbols", "second", "words"

_MOST_ROUNDS = 5

SURE = 0.95  # probability from which a gain is not taken for chance

# Values of each field of `Weights`. A language model of weight 0 is refused by `DecodingConfig`: it
# is left out instead.
GRIDS: dict[str, tuple[float, ...]] = {
    "ctc_weight": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    "lm_weight": (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0),
    "length_penalty": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2),
    "second_lm_weight": (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0),
    "second_word_bonus": (-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0),
}


@dataclass(frozen=True, slots=True)
class Weights:
    """The fields of `DecodingConfig` of the same names, without None."""

    ctc_weight: float = 0.0
    lm_weight: float = LM_WEIGHT
    length_penalty: float = 0.0
    second_lm_weight: float = LM_WEIGHT
    second_word_bonus: float = 0.0

    @classmethod
    def from_config(cls, config: DecodingConfig, method: str) -> "Weights":
        second = config.second_lm_weight
        return cls(
            ctc_weight=config.ctc_weight,
            lm_weight=config.effective_lm_weight,
            length_penalty=config.effective_length_penalty if method == "attention" else 0.0,
            second_lm_weight=LM_WEIGHT if second is None else second,
            second_word_bonus=config.second_word_bonus or 0.0,
        )


def tunable(model: ASRModel, config: DecodingConfig, method: str) -> tuple[str, ...]:
    """Return the names of the weights that have an effect on the choice.

    With a second language model the length penalty has none: it ranks by scores.
    """
    attends, second = method == "attention", config.second_lm is not None
    has_effect = {
        "ctc_weight": attends and model.config.ctc,
        "lm_weight": config.lm is not None,
        "length_penalty": attends and not second,
        "second_lm_weight": second,
        "second_word_bonus": second,
    }
    names = tuple(name for name, is_effective in has_effect.items() if is_effective)
    if not names:
        raise ValueError(
            f"`method` {method} must have a weight to tune, but has none by itself: add "
            "`second_lm`, or for CTC `lm`."
        )
    return names


class NBestLists:
    """The scores of all alternatives by part, and the errors of the chosen ones."""

    def __init__(
        self,
        utterances: Sequence[tuple[str, Transcription]],
        config: DecodingConfig,
        weights: Weights,
        judges: Sequence[Callable[[str, str], Counts]],  # of reference and text of each utterance
    ) -> None:
        self._judges = judges
        self._references = [reference for reference, _ in utterances]
        self._results = [result for _, result in utterances]
        self._second = config.second_lm is not None
        lists = [segment.alternatives for result in self._results for segment in result.segments]
        self.size = max(map(len, lists), default=0)
        shape = len(lists), self.size
        self._parts = {name: np.zeros(shape) for name in _COLUMNS}
        self._missing, self._unexplained = np.ones(shape, dtype=bool), np.zeros(shape)
        ranks = np.zeros(shape)
        for row, alternatives in enumerate(lists):
            for column, alternative in enumerate(alternatives):
                self._missing[row, column] = False
                ranks[row, column] = alternative.rank
                if (parts := alternative.parts) is None:
                    continue  # of another search (`fallback`), whose list has no other text
                for name, value in {
                    "model": parts.model,
                    "ctc": parts.ctc or 0.0,
                    "lm": parts.lm or 0.0,
                    "symbols": parts.symbols,
                    "second": alternative.lm_score or 0.0,
                    "words": len(alternative.text.split()),
                }.items():
                    self._parts[name][row, column] = value
        # What the weights do not explain, such as coverage.
        self._unexplained = np.where(self._missing, 0.0, ranks - self._ranks(weights))
        self._counts: dict[tuple[int, str], Counts] = {}
        self._chosen: dict[bytes, tuple[tuple[Counts, ...], np.ndarray]] = {}
        self._seen: dict[Weights, bytes] = {}

    @property
    def utterances(self) -> int:
        return len(self._results)

    def _ranks(self, weights: Weights) -> np.ndarray:
        parts, share = self._parts, weights.ctc_weight
        scores = _times(1 - share, parts["model"]) + _times(share, parts["ctc"])
        scores = scores + _times(weights.lm_weight, parts["lm"])
        if self._second:
            scores = scores + _times(weights.second_lm_weight, parts["second"])
            return scores + weights.second_word_bonus * parts["words"] + self._unexplained
        return scores / ((5 + parts["symbols"]) / 6) ** weights.length_penalty + self._unexplained

    def choices(self, weights: Weights) -> np.ndarray:
        """Return each segment's best alternative, int64."""
        if not self.size:
            return np.zeros(len(self._missing), dtype=np.int64)
        return np.where(self._missing, -np.inf, self._ranks(weights)).argmax(axis=1)

    def errors(self, weights: Weights) -> tuple[Counts, ...]:
        return self._counted(weights)[0]

    def word_errors(self, weights: Weights) -> np.ndarray:
        return self._counted(weights)[1]

    def tried(self) -> np.ndarray:
        """Return the errors of all different choices so far, (choices, utterances)."""
        return np.stack([words for _, words in self._chosen.values()])

    def _counted(self, weights: Weights) -> tuple[tuple[Counts, ...], np.ndarray]:
        # Most weights choose as others do.
        if weights not in self._seen:
            chosen = self.choices(weights)
            key = self._seen[weights] = chosen.tobytes()
            if key not in self._chosen:
                errors = self._errors(chosen.tolist())
                words = np.array([count.errors for count in errors])
                self._chosen[key] = errors, words
        return self._chosen[self._seen[weights]]

    def _errors(self, choices: Sequence[int]) -> tuple[Counts, ...]:
        counts, rows = [], iter(choices)
        for number, result in enumerate(self._results):
            texts = [_text(segment, next(rows)) for segment in result.segments]
            counts.append(self._count(number, result.space.join(text for text in texts if text)))
        return tuple(counts)

    def _count(self, number: int, text: str) -> Counts:
        key = number, text
        if key not in self._counts:
            self._counts[key] = self._judges[number](self._references[number], text)
        return self._counts[key]

    def oracle(self) -> tuple[Counts, ...]:
        """Return the errors of each utterance, if the best of its alternatives were chosen."""
        return tuple(
            min(
                (self._count(number, text) for text in {text.text for text in result.alternatives}),
                key=lambda counts: counts.errors,
                default=self._count(number, result.text),
            )
            for number, result in enumerate(self._results)
        )


def _text(segment: Segment, choice: int) -> str:
    return segment.alternatives[choice].text if segment.alternatives else segment.text


def _times(weight: float, values: np.ndarray) -> np.ndarray | float:
    """Return the product; 0 for a weight of 0, also of an impossible transcript."""
    return weight * values if weight else 0.0


def best_weights(
    lists: NBestLists,
    start: Weights,
    grids: Mapping[str, Sequence[float]],
    on_trial: Callable[[], None] | None = None,
) -> Weights:
    """Return weights that make fewer word errors on these lists, or ``start``.

    Coordinate descent over pairs of weights, as two may depend on each other: a language model
    favours short texts, which a bonus for words balances. A gain is taken for chance unless it is
    larger than the best of as many trials would have by chance; see `chance_of_best`. Then each
    weight goes back to its start, unless that makes more errors in most draws of the bootstrap. The
    result never makes more errors on these lists than ``start``.
    """
    before = lists.errors(start)
    values = {name: _by_distance(grid, getattr(start, name)) for name, grid in grids.items()}
    best, fewest = start, lists.word_errors(start).sum()
    for _ in range(_MOST_ROUNDS):
        previous = fewest
        for group in list(combinations(values, 2)) or [tuple(values)]:
            for chosen in product(*(values[name] for name in group)):
                tried = replace(best, **dict(zip(group, chosen, strict=True)))
                errors = lists.word_errors(tried).sum()
                if errors < fewest:
                    best, fewest = tried, errors
                if on_trial is not None:
                    on_trial()
        if fewest == previous:
            break
    if chance_of_best(lists.word_errors(start), lists.tried()) > 1 - SURE:
        return start
    for name in grids:
        reverted = replace(best, **{name: getattr(start, name)})
        if not _is_better(lists.errors(reverted), lists.errors(best)):
            best = reverted
    return best if _is_better(before, lists.errors(best)) else start


def _is_better(before: Sequence[Counts], after: Sequence[Counts]) -> bool:
    """Return whether the second makes fewer errors, and is better in most draws."""
    fewer = sum(counts.errors for counts in after) < sum(counts.errors for counts in before)
    return fewer and probability_of_improvement(before, after) >= SURE


def _by_distance(grid: Sequence[float], start: float) -> list[float]:
    """Return the values to try: of equally good ones, the nearest to the start is tried first."""
    return sorted({*grid, start}, key=lambda value: abs(value - start))
