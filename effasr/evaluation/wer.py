"""Word and character errors, as counts that can be added."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import ClassVar

import jiwer
import numpy as np

from effasr.data.scripts import UNSPACED, UNSPACED_CHARACTER, split_words
from effasr.evaluation.metric import BY_NAME, Metric


@dataclass(frozen=True, slots=True)
class ErrorCounts:
    """Word and character errors of some utterances; see `total` to add them."""

    metric: ClassVar[Metric] = BY_NAME["wer"]

    utterances: int = 0
    words: int = 0  # words of the references
    insertions: int = 0
    deletions: int = 0
    substitutions: int = 0
    characters: int = 0  # characters of the references; a space between words is one
    character_errors: int = 0  # insertions, deletions and substitutions of characters
    unspaced: int = 0  # characters of the references in scripts without spaces between words

    @property
    def statistics(self) -> tuple[int, ...]:
        """Counts whose sums give the word error rate."""
        return self.errors, self.words

    @classmethod
    def rates(cls, sums: np.ndarray) -> np.ndarray:
        """Return the word error rate of each column of sums, float64 (n,); NaN without words."""
        errors, words = sums
        return np.divide(errors, words, out=np.full(len(words), np.nan), where=words > 0)

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

    @property
    def main_rate(self) -> tuple[str, float]:
        """The rate that is usual for the script: WER, or CER without spaces between words."""
        return ("CER", self.cer) if 2 * self.unspaced > self.characters else ("WER", self.wer)


_SPACE_BESIDE = re.compile(f"(?<=[{UNSPACED}]) | (?=[{UNSPACED}])")


def count_errors(reference: str, hypothesis: str) -> ErrorCounts:
    """Align a hypothesis with its reference, with the fewest edits.

    Words are those of `split_words`; normalise both texts before. Where several alignments are
    equally short, the split into the three kinds is the aligner's choice; the sum is unique. All
    words of a hypothesis of an empty reference are insertions. Spaces beside characters of scripts
    without them are no characters.
    """
    expected, received = split_words(reference), split_words(hypothesis)
    words = jiwer.process_words(" ".join(expected), " ".join(received))
    reference, hypothesis = (
        _SPACE_BESIDE.sub("", " ".join(text.split())) for text in (reference, hypothesis)
    )
    characters = jiwer.process_characters(reference, hypothesis)
    return ErrorCounts(
        utterances=1,
        words=len(expected),
        insertions=words.insertions,
        deletions=words.deletions,
        substitutions=words.substitutions,
        characters=len(reference),
        character_errors=characters.insertions + characters.deletions + characters.substitutions,
        unspaced=len(UNSPACED_CHARACTER.findall(reference)),
    )


def total(counts: Iterable[ErrorCounts]) -> ErrorCounts:
    """Add counts: rates of the result are those of the whole set, not means over its parts."""
    counts = list(counts)
    names = [field.name for field in fields(ErrorCounts)]
    return ErrorCounts(**{name: sum(getattr(part, name) for part in counts) for name in names})
