import math
import random
from operator import attrgetter

import jiwer
import kaldialign
import pytest

from effasr.evaluation.wer import ErrorCounts, count_errors, total

COUNTS = "insertions", "deletions", "substitutions"


@pytest.mark.parametrize(
    ("reference", "hypothesis", *COUNTS),
    [
        ("the cat sat", "the cat sat", 0, 0, 0),
        ("the cat sat", "the cat", 0, 1, 0),
        ("the cat sat", "the black cat sat", 1, 0, 0),
        ("the cat sat", "the bat sat", 0, 0, 1),
        ("the cat sat", "", 0, 3, 0),
        ("", "the cat", 2, 0, 0),
        ("", "", 0, 0, 0),
        ("one two three", "two three four", 1, 1, 0),
        ("a  b\tc\n", " a b c", 0, 0, 0),
    ],
)
def test_by_hand(reference, hypothesis, insertions, deletions, substitutions):
    counts = count_errors(reference, hypothesis)
    assert attrgetter(*COUNTS)(counts) == (insertions, deletions, substitutions)
    assert (counts.words, counts.utterances) == (len(reference.split()), 1)


def test_rates_are_those_of_all_words_and_of_characters_with_spaces():
    counts = count_errors("ab cd", "abcd")
    assert (counts.characters, counts.character_errors) == (5, 1)
    assert (counts.cer, counts.wer) == pytest.approx((0.2, 1.0))
    long, four = "c d e f g h i j k", "a b c d"
    counts = total([count_errors("a", "b"), count_errors(long, long)])
    assert (counts.utterances, counts.words, counts.substitutions) == (2, 10, 1)
    assert counts.wer == pytest.approx(0.1)
    # Words that are inserted on an empty reference count in the set.
    assert total([count_errors("", "noise"), count_errors(four, four)]).wer == pytest.approx(0.25)
    assert math.isnan(count_errors("", "noise").wer)
    assert math.isnan(total([]).cer)
    assert total([]) == ErrorCounts()


def _random_sentences(seed: int) -> tuple[str, str]:
    draw = random.Random(seed)
    words = [draw.choice("abcde") for _ in range(draw.randrange(12))]
    spoken = " ".join(words)
    for _ in range(draw.randrange(5)):
        position = draw.randrange(len(words) + 1)
        words[position : position + draw.randrange(2)] = [draw.choice("abcde")] * draw.randrange(2)
    return spoken, " ".join(words)


@pytest.mark.parametrize("seed", range(50))
def test_agrees_with_both_scorers(seed):
    """The sum of errors is unique; how it splits is up to the aligner, within one identity."""
    reference, hypothesis = _random_sentences(seed)
    counts = count_errors(reference, hypothesis)
    theirs = kaldialign.edit_distance(reference.split(), hypothesis.split())
    assert counts.errors == theirs["total"]
    assert counts.words == theirs["ref_len"]
    assert counts.insertions - counts.deletions == theirs["ins"] - theirs["del"]
    if reference:
        assert counts.wer == pytest.approx(jiwer.wer(reference, hypothesis))
        assert counts.cer == pytest.approx(jiwer.cer(reference, hypothesis))
