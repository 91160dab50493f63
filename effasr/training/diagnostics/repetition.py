"""Detects hypotheses in which the decoder repeats itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from effasr.evaluation.result import ScoredUtterance
from effasr.training.diagnostics.finding import Finding, Validation

_COPIES = 4
"""Number of successive copies of an n-gram that count as a loop."""

_WORDS = 8
_CHARACTERS = 16
"""Length of the longest n-grams, in words and in characters, that are searched for."""

_LEAST_CHARACTERS = 16
"""Least length of a loop of characters: "hahaha" is a word."""

_SHARE = 0.05
"""Share of looping hypotheses from which on there is a warning."""

_FEWEST = 2


def is_loop(text: str) -> bool:
    """Return whether words or characters are repeated four times or more, without a gap."""
    words = text.split()
    if _longest_run(words, _WORDS) >= 1:
        return True
    return _longest_run("".join(words), _CHARACTERS, _LEAST_CHARACTERS) >= 1


def count_loops(utterances: Iterable[ScoredUtterance]) -> int:
    """Return the number of hypotheses that loop where the reference does not."""
    return sum(is_loop(one.hypothesis) and not is_loop(one.reference) for one in utterances)


def _longest_run(units: Sequence[str], longest: int, least: int = 0) -> int:
    """Return the length of the longest n-gram, up to ``longest``, with enough copies, or 0."""
    found = 0
    for period in range(1, min(longest, len(units) // _COPIES) + 1):
        needed = max(period * _COPIES, least) - period
        equal = 0
        for unit, earlier in zip(units[period:], units, strict=False):
            equal = equal + 1 if unit == earlier else 0
            if equal >= needed:
                found = period
                break
    return found


class Repetition:
    """Checks the share of hypotheses that loop.

    Args:
        method: The decoding method in validation.
        has_ctc: Whether the model has a CTC head.
    """

    def __init__(self, method: str, *, has_ctc: bool) -> None:
        self._method = method
        self._has_ctc = has_ctc

    def check(self, validation: Validation) -> Finding | None:
        """Return a finding if too many hypotheses of a validation loop."""
        count, every = validation.loops, validation.errors.utterances
        if count < _FEWEST or count < _SHARE * every:
            return None
        return Finding(
            "Hypotheses repeat themselves",
            f"In {count} of {every} a part is repeated {_COPIES} times or more, and not in the "
            "reference.",
            self._remedy(),
        )

    def _remedy(self) -> str:
        if self._method != "attention":
            return "train longer: more updates, or a lower optimizer.lr."
        joint = "evaluation.decoding.ctc_weight=0.3 (--ctc-weight), which follows the speech, or "
        return (
            f"decode with {joint if self._has_ctc else ''}evaluation.decoding.no_repeat_ngram=4 "
            "(--no-repeat-ngram), which forbids a second copy of 4 tokens. If the decoder ignores "
            "the audio, too, no decoding helps: see that warning."
        )
