"""N-grams over tokens by hand, over words by those over tokens, and words in a search."""

import gzip
import itertools
import math
import random
from pathlib import Path

import pytest
import torch

from effasr.decoding.config import DecodingConfig
from effasr.decoding.decoded import log_probs_of_texts
from effasr.decoding.lm.loading import load_lm
from effasr.decoding.lm.ngram import TokenNgrams, load_ngrams
from effasr.decoding.lm.words import WordFusion, WordNgrams, load_word_ngrams
from tests.decoding.cases import decode_all, write_arpa

V, EOS = 6, 5
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


TOKENS = ARPA.format(a="0", b="1", c="2")


@pytest.fixture
def path(tmp_path) -> Path:
    made = tmp_path / "lm.arpa"
    made.write_text(TOKENS)
    return made


@pytest.fixture
def lm(tmp_path) -> WordNgrams:
    path = tmp_path / "words.arpa.gz"
    path.write_bytes(gzip.compress(ARPA.format(a="the", b="CAT", c="sat's").encode()))
    return load_word_ngrams(path)


@pytest.fixture
def words(tmp_path) -> WordNgrams:
    path = tmp_path / "numbers.arpa"
    path.write_text(ARPA.format(a="one", b="two", c="five"))
    return load_word_ngrams(path)


def _log10(model: TokenNgrams, context, token: int) -> float:
    provided = torch.tensor(context, dtype=torch.int64).reshape(1, 1, -1)
    scores = model.scores(provided, torch.tensor([[[token]]]))
    assert scores.shape == (1, 1, 2)
    assert scores[0, 0, 1] == model.scores(provided, torch.tensor([[[EOS]]]))[0, 0, 0]
    return float(scores[0, 0, 0]) / math.log(10)


@pytest.mark.parametrize(
    ("context", "token", "expected"),
    [
        ([], 0, -0.2),
        ([-1, -1], 0, -0.2),
        ([], 1, -0.30 - 0.7),
        ([0], 1, -0.1),
        ([-1, 0], 1, -0.1),
        ([0], 2, -0.40 - 0.25 - 0.9),
        ([0, 1], 2, -0.05),
        ([2, 0, 1], 2, -0.05),
        ([0, 1], EOS, -0.15 - 0.5),
        ([2, 0], 1, -0.3),
        ([1, 2], 0, -0.2 - 0.6),
        ([2, 2], EOS, -0.8),
        ([2, 2], 4, -1.5),
        ([0, 1], 4, -0.15 - 0.10 - 1.5),
    ],
)
def test_scores_back_off_to_shorter_contexts(context, token, expected, path) -> None:
    assert _log10(load_ngrams(path, V, EOS), context, token) == pytest.approx(expected)


def test_many_contexts_at_a_time_and_gzip(path, tmp_path) -> None:
    model = load_ngrams(path, V, EOS)
    packed = tmp_path / "lm.arpa.gz"
    packed.write_bytes(gzip.compress(TOKENS.encode()))
    contexts = torch.tensor([[[-1, -1, 0], [2, 0, 1]], [[-1, -1, -1], [1, 2, 2]]])
    symbols = torch.tensor([[[0, 1], [2, 4]], [[0, 3], [1, 0]]])
    scores = load_ngrams(packed, V, EOS).scores(contexts, symbols)
    assert scores.dtype == torch.float64
    for n in range(2):
        for k in range(2):
            for c in range(2):
                alone = _log10(model, contexts[n, k].tolist(), int(symbols[n, k, c]))
                assert float(scores[n, k, c]) == pytest.approx(alone * math.log(10))


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("0 1 2", "0 1 ▁the", r"lm.arpa:22: `▁the` must be a token id below 6: estimate"),
        ("0 1 2", "0 1 6", r"`6` must be a token id below 6"),
        ("ngram 2=4", "ngram 2=5", r"promises \[6, 5, 2\] n-grams, but there are \[6, 4, 2\]"),
        ("\\end\\", "", r"from \\data\\ to \\end\\, but ends in \\3-grams:"),
        ("-0.7\t1\t-0.10", "0.7\t1\t-0.10", r"lm.arpa:11 must be a log-probability, 1 words"),
        ("-0.7\t1\t-0.10", "-0.7", "must be a log-probability, 1 words"),
        ("ngram 1=6", "ngrams 1=6", "must be like `ngram 1=120`, but is `ngrams 1=6`"),
        ("\\3-grams:", "\\trigrams", r"`\\trigrams` is no section"),
        (TOKENS, "", "but ends in no section"),
        (TOKENS, "\ufffd\0", "but ends in no section"),
    ],
)
def test_what_is_no_model_of_tokens_is_refused(old, new, match, path) -> None:
    assert old in TOKENS
    path.write_text(TOKENS.replace(old, new))
    with pytest.raises(ValueError, match=match):
        load_ngrams(path, V, EOS)
    if "token id" not in match:
        with pytest.raises(ValueError, match=match):
            load_word_ngrams(path)


def test_texts_have_the_scores_of_the_same_model_over_tokens(path, lm) -> None:
    tokens = load_ngrams(path, V, EOS)
    names = {0: "the", 1: "CAT", 2: "sat's", 3: "dog"}
    seen = set()
    for n in range(5):
        for ids in itertools.product(names, repeat=n):
            (whole,) = log_probs_of_texts(tokens, [ids])
            end = tokens.scores(torch.tensor([[[-1, *ids]]]), torch.tensor([[[0]]]))[0, 0, 1]
            (result,) = lm.log_probs([("", " ".join(names[item] for item in ids))])
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


def whole(words: WordNgrams, text: str) -> float:
    """The log-probability of a text and its end."""
    (result,) = words.log_probs([("", text)])
    return result + words.log_prob([-1, *words.word_ids(text)], words.end_id)


def test_a_text_has_the_score_of_its_words_and_its_end(words, tokenizer) -> None:
    lm, draw = WordFusion(words, tokenizer), random.Random(0)
    texts = ["", "one", "one two", "seven one two five eight"]
    texts += [" ".join(draw.choices(["one", "two", "five", "nine"], k=3 + n)) for n in range(20)]
    ids = [tokenizer.encode(text, "en") for text in texts]
    expected = [whole(words, text) for text in texts]
    assert log_probs_of_texts(lm, ids) == pytest.approx(expected)
    assert len({round(item, 6) for item in expected}) > 15


def test_long_texts_are_scored_by_their_last_words(words, tokenizer) -> None:
    text = " ".join(["one", "two", "five"] * 60)
    ids = tokenizer.encode(text, "en")
    lm = WordFusion(words, tokenizer)
    assert len(ids) > 2 * lm.order
    assert log_probs_of_texts(lm, [ids]) == pytest.approx([whole(words, text)])


def test_the_unit_must_suit_the_model(tmp_path, model, tokenizer) -> None:
    config = DecodingConfig(lm=tmp_path, lm_unit="word")
    with pytest.raises(ValueError, match="`lm_unit` must be token for a folder"):
        load_lm(config, model, tokenizer)


@pytest.mark.parametrize(
    "options", [{"beam": 1}, {"beam": 4, "ctc_weight": 0.3}, {"beam": 4, "method": "ctc"}]
)
def test_a_strong_language_model_changes_what_is_said(
    options, examples, model, tokenizer, tmp_path
) -> None:
    """It allows three tokens alone."""
    grams = ["-99\t<s>", "-2\t</s>", "-0.5\t20", "-0.5\t21", "-0.5\t22"]
    with_lm = {**options, "lm": write_arpa(tmp_path / "lm.arpa", grams), "lm_weight": 10.0}
    results = decode_all(examples, model, tokenizer, **with_lm)
    assert results != decode_all(examples, model, tokenizer, **options)
    # What the decoder finds too unlikely to be a candidate cannot be said.
    if options.get("method") == "ctc":
        assert any(result.tokens for result in results)
        assert {token for result in results for token in result.tokens} <= {20, 21, 22}
    alone = [decode_all([example], model, tokenizer, **with_lm)[0] for example in examples]
    assert alone == results
