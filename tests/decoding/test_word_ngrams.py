"""N-grams over words, against those over tokens and by hand."""

import gzip
import itertools
import math

import pytest
import torch

from effasr.decoding.decoded import log_probs_of_texts
from effasr.decoding.lm.ngram import load_ngrams
from effasr.decoding.lm.words import WordNgrams, load_word_ngrams

ARPA = """\\data\\
ngram 1=6
ngram 2=4
ngram 3=2

\\1-grams:
-1.5\t<unk>
-99\t<s>\t-0.30
-0.8\t</s>
-0.6\t{a}\t-0.25
-0.7\t{b}\t-0.10
-0.9\t{c}

\\2-grams:
-0.2\t<s> {a}\t-0.40
-0.3\t{a} {b}\t-0.15
-0.5\t{b} </s>
-0.4 {b} {c} -0.2

\\3-grams:
-0.1\t<s> {a} {b}
-0.05\t{a} {b} {c}

\\end\\
"""


@pytest.fixture
def lm(tmp_path) -> WordNgrams:
    path = tmp_path / "lm.arpa.gz"
    path.write_bytes(gzip.compress(ARPA.format(a="the", b="CAT", c="sat's").encode()))
    return load_word_ngrams(path)


def test_texts_have_the_scores_of_the_same_model_over_tokens(tmp_path, lm) -> None:
    path = tmp_path / "tokens.arpa"
    path.write_text(ARPA.format(a="0", b="1", c="2"))
    tokens = load_ngrams(path, 6, 5)
    names = {0: "the", 1: "CAT", 2: "sat's", 3: "dog"}
    seen = set()
    for n in range(5):
        for ids in itertools.product(names, repeat=n):
            (whole,) = log_probs_of_texts(tokens, [ids])
            end = tokens.scores(torch.tensor([[[-1, *ids]]]), torch.tensor([[[0]]]))[0, 0, 1]
            text = " ".join(names[item] for item in ids)
            (result,) = lm.log_probs([("", text)])
            assert result == pytest.approx(whole - float(end))
            seen.add(round(result, 6))
    assert len(seen) > 80


def test_earlier_words_are_context_without_a_score(lm) -> None:
    (whole,) = lm.log_probs([("", "the CAT sat's")])
    (first, remainder) = lm.log_probs([("", "the"), ("the", "CAT sat's")])
    assert first + remainder == pytest.approx(whole) == math.log(10) * -0.35
    assert lm.log_probs([("the CAT", "")]) == [0.0]
    alone, after = lm.log_probs([("", "sat's"), ("one two the CAT", "sat's")])
    assert alone == pytest.approx((-0.9 - 0.3) * math.log(10))
    assert after == pytest.approx(-0.05 * math.log(10))


def test_words_are_found_without_punctuation_and_in_other_cases(lm) -> None:
    (plain,) = lm.log_probs([("", "the CAT sat's")])
    (written,) = lm.log_probs([("", "“The cat — Sat's!”")])
    assert written == plain
    assert lm.word_ids("dog <s> …") == [-2, -2]
    assert len(set(lm.word_ids("the cat sat's"))) == 3


def test_words_may_have_spaces_beyond_those_of_ascii(tmp_path) -> None:
    path = tmp_path / "lm.arpa"
    text = ARPA.format(a="bonjour\u00a0!", b="\u3000", c="d").replace("\n", "\r\n")
    path.write_bytes(text.encode())
    lm = load_word_ngrams(path)
    assert set(lm._ids) == {"</s>", "bonjour\u00a0!", "\u3000", "d"}
    first, second = lm._ids["bonjour\u00a0!"], lm._ids["\u3000"]
    assert lm.log_prob([-1, first], second) == pytest.approx(-0.1 * math.log(10))


def test_files_that_are_no_models_are_refused(tmp_path) -> None:
    path = tmp_path / "lm.arpa"
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_word_ngrams(path)
    path.write_text("the cat sat\n")
    with pytest.raises(ValueError, match="must be an ARPA file"):
        load_word_ngrams(path)
    text = ARPA.format(a="the", b="cat", c="sat")
    path.write_text(text.replace("ngram 2=4", "ngram 2=5"))
    with pytest.raises(ValueError, match=r"promises \[6, 5, 2\] n-grams"):
        load_word_ngrams(path)
