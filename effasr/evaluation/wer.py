"""Word and character errors, as counts that can be added."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import jiwer


@dataclass(frozen=True, slots=True)
class ErrorCounts:
    """Word and character errors of some utterances; see `total` to add them."""

    utterances: int = 0
    words: int = 0  # words of the references
    insertions: int = 0
    deletions: int = 0
    substitutions: int = 0
    characters: int = 0  # characters of the references; a space between words is one
    character_errors: int = 0  # insertions, deletions and substitutions of characters

    @property
    def errors(self) -> int:
        return self.insertions + self.deletions + self.substitutions

    @property
    def wer(self) -> float:
        """Word error rate, 0.1 = 10 %; over 1 is possible. NaN where no reference has a word."""
        return self.errors / self.words if self.words else math.nan

    @property
    def cer(self) -> float:
        return self.character_errors / self.characters if self.characters else math.nan


def count_errors(reference: str, hypothesis: str) -> ErrorCounts:
    """Align a hypothesis with its reference, with the fewest edits.

    Words are separated by white space; normalise both texts before. Where several alignments are
    equally short, the split into the three kinds is the aligner's choice; the sum is unique. All
    words of a hypothesis of an empty reference are insertions.
    """
    reference, hypothesis = " ".join(reference.split()), " ".join(hypothesis.split())
    words = jiwer.process_words(reference, hypothesis)
    characters = jiwer.process_characters(reference, hypothesis)
    return ErrorCounts(
        utterances=1,
        words=len(reference.split()),
        insertions=words.insertions,
        deletions=words.deletions,
        substitutions=words.substitutions,
        characters=len(reference),
        character_errors=characters.insertions + characters.deletions + characters.substitutions,
    )


def total(counts: Iterable[ErrorCounts]) -> ErrorCounts:
    """Add counts: rates of the result are those of the whole set, not means over its parts."""
    counts = list(counts)
    names = [field.name for field in fields(ErrorCounts)]
    return ErrorCounts(**{name: sum(getattr(part, name) for part in counts) for name in names})
