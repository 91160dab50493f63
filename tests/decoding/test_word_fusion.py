"""Word n-grams in a search over tokens: the sum over the tokens of a text is that of its words."""

import random

import pytest

from effasr.decoding.config import DecodingConfig
from effasr.decoding.decoded import log_probs_of_texts
from effasr.decoding.lm.loading import load_lm
from effasr.decoding.lm.words import WordFusion, WordNgrams, load_word_ngrams

ARPA = """\\data\\
ngram 1=6
ngram 2=4

\\1-grams:
-1.5\t<unk>
-99\t<s>\t-0.30
-0.8\t</s>\t
-0.6\tone\t-0.25
-0.7\ttwo\t-0.10
-0.9\tfive

\\2-grams:
-0.2\t<s> one
-0.3\tone two
-0.5\ttwo </s>
-0.4\ttwo five

\\end\\
"""


@pytest.fixture
def words(tmp_path) -> WordNgrams:
    path = tmp_path / "lm.arpa"
    path.write_text(ARPA)
    return load_word_ngrams(path)


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


def test_any_tokens_have_the_score_of_what_they_spell(words, tokenizer) -> None:
    """Tokens of a search in any order, also those that begin no word after nothing."""
    lm, draw = WordFusion(words, tokenizer), random.Random(1)
    special = set(tokenizer.specials.values())
    plain = [n for n in range(tokenizer.vocab_size) if n not in special]
    rows = [draw.choices(plain, k=n % 12) for n in range(60)]
    expected = [whole(words, tokenizer.decode(row)) for row in rows]
    assert log_probs_of_texts(lm, rows) == pytest.approx(expected)


def test_long_texts_are_scored_by_their_last_words(words, tokenizer) -> None:
    text = " ".join(["one", "two", "five"] * 60)
    ids = tokenizer.encode(text, "en")
    lm = WordFusion(words, tokenizer)
    assert len(ids) > 2 * lm.order
    assert log_probs_of_texts(lm, [ids]) == pytest.approx([whole(words, text)])


def test_the_unit_must_suit_the_model(tmp_path, model, tokenizer) -> None:
    with pytest.raises(ValueError, match="`lm_unit` must be token where there is no `lm`"):
        DecodingConfig(lm_unit="word")
    config = DecodingConfig(lm=tmp_path, lm_unit="word")
    with pytest.raises(ValueError, match="`lm_unit` must be token for a folder"):
        load_lm(config, model, tokenizer)
