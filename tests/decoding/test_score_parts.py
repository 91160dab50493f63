"""Parts of scores: with the weights of the search they give its scores again."""

import pytest

from effasr.decoding.decoded import log_probs_of_texts
from effasr.decoding.lm.ngram import load_ngrams
from tests.decoding.cases import decode_all, write_arpa

WEIGHT = 0.4
WORDS = ["one", "two", "three", "four", "five", "six"]


@pytest.fixture(scope="module")
def arpa(tokenizer, tmp_path_factory):
    """Bigrams that make the score of a text depend on its order, its start and its end."""
    size = tokenizer.vocab_size
    single = [f"-{1 + n % 3}.5\t{n}\t-0.{n % 7}" for n in range(size) if n != tokenizer.eos_id]
    double = [f"-0.{1 + n % 8}\t{n} {(7 * n) % size}" for n in range(size)]
    double = [line for line in double if str(tokenizer.eos_id) not in line.split()]
    double += ["-0.3\t<s> 9", "-0.2\t11 </s>"]
    single += ["-99\t<s>\t-0.6", "-1.1\t</s>"]
    return write_arpa(tmp_path_factory.mktemp("lm") / "lm.arpa", single, double)


@pytest.fixture(scope="module")
def words_arpa(tmp_path_factory):
    """Words of the tokenizer's texts, and what follows them."""
    single = ["-2.5\t<unk>", "-99\t<s>\t-0.6", "-1.1\t</s>"]
    single += [f"-{n}.25\t{word}\t-0.{n}" for n, word in enumerate(WORDS)]
    pairs = zip(["<s>", *WORDS], [*WORDS[1:], "</s>"], strict=False)
    double = [f"-0.3\t{a} {b}" for a, b in pairs]
    return write_arpa(tmp_path_factory.mktemp("words") / "lm.arpa", single, double)


@pytest.mark.parametrize(("share", "unit"), [(0.0, "token"), (0.3, "token"), (0.3, "word")])
def test_parts_of_the_decoder_add_up(
    share, unit, examples, model, tokenizer, arpa, words_arpa
) -> None:
    matches = decode_all(
        examples, model, tokenizer, method="attention", beam=4, nbest=3, score_parts=True,
        ctc_weight=share, lm=words_arpa if unit == "word" else arpa, lm_unit=unit,
        lm_weight=WEIGHT, length_penalty=0.6,
    )  # fmt: skip
    listed = [item for result in matches for item in result.alternatives]
    assert len({item.tokens for item in listed}) > 6
    for item in listed:
        parts = item.parts
        assert parts is not None
        received = share * parts.ctc if share else 0.0
        score = (1 - share) * parts.model + received + WEIGHT * parts.lm
        assert item.score == pytest.approx(score, abs=1e-4)
        assert item.rank == pytest.approx(score / ((5 + parts.symbols) / 6) ** 0.6, abs=1e-4)
        assert parts.symbols == len(item.tokens) + 1


def test_parts_of_ctc_leave_out_the_language_model(examples, model, tokenizer, arpa) -> None:
    options = {"method": "ctc", "beam": 4, "nbest": 4, "score_parts": True}
    matches = decode_all(examples, model, tokenizer, lm=arpa, lm_weight=WEIGHT, **options)
    lm = load_ngrams(arpa, tokenizer.vocab_size, tokenizer.eos_id)
    for item in (item for result in matches for item in result.alternatives):
        (written,) = log_probs_of_texts(lm, [item.tokens])
        assert item.parts.lm == pytest.approx(written)
        assert item.parts.model == pytest.approx(item.score - WEIGHT * written)
        assert item.parts.ctc is None
    plain = decode_all(examples, model, tokenizer, **options)
    assert all(item.parts.model == item.score for result in plain for item in result.alternatives)
    assert log_probs_of_texts(lm, []) == []
