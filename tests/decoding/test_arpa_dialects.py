"""ARPA files as different programs write them."""

import math

import pytest
import torch

from effasr.decoding.lm.ngram import load_ngrams
from effasr.decoding.lm.words import load_word_ngrams

TEXT = """\\data\\
ngram 1=5
ngram 2=3

\\1-grams:
-1.5\t<unk>
-99\t<s>\t-0.1
-0.5\tcat\t-0.2
-0.7\tsat\t-0.3
-0.9\t</s>

\\2-grams:
-0.2\t<s> cat
-0.3\tcat sat
-0.4\tsat </s>

\\end\\
"""
UPPER = TEXT.replace("<unk>", "<UNK>").replace("<s>", "<S>").replace("</s>", "</S>")
WITHOUT_END = (
    TEXT.replace("-0.9\t</s>\n", "").replace("-0.4\tsat </s>\n", "")
    .replace("1=5", "1=4").replace("2=3", "2=2")
)  # fmt: skip
CERTAIN_END = WITHOUT_END.replace("1=4", "1=5").replace("\\2-grams", "0\t</s>\t-0.1\n\n\\2-grams")
WITHOUT_UNKNOWN = TEXT.replace("-1.5\t<unk>\n", "").replace("1=5", "1=4")


@pytest.mark.parametrize(
    ("text", "end", "unknown", "warned"),
    [
        (TEXT, -0.4, -1.5, ""),
        (UPPER, -0.4, -1.5, ""),
        (f"Made by hand\n\n{TEXT}", -0.4, -1.5, ""),
        (WITHOUT_END, 0.0, -1.5, "has no </s>"),
        (CERTAIN_END, 0.0, -1.5, "has no </s>"),
        (WITHOUT_UNKNOWN, -0.4, -100.0, "has no <unk>"),
    ],
)
def test_dialects_have_the_scores_of_what_they_hold(tmp_path, caplog, text, end, unknown, warned):
    (tmp_path / "lm.arpa").write_text(text)
    words = load_word_ngrams(tmp_path / "lm.arpa")
    scores = [*words.log_probs([("", "cat sat"), ("cat sat", "bird")]), 0.0]
    scores[2] = words.end_log_prob([-1, *words.word_ids("cat sat")])
    expected = [-0.5, -0.3 + unknown, end]
    assert [score / math.log(10) for score in scores] == pytest.approx(expected)
    assert warned in caplog.text
    assert bool(caplog.records) == bool(warned)
    # The same over tokens, as ids and as pieces.
    pieces = ["cat", "sat", "bird", "<eos>"]
    (tmp_path / "ids.arpa").write_text(text.replace("cat", "0").replace("sat", "1"))
    for name in ("ids.arpa", "lm.arpa"):
        tokens = load_ngrams(tmp_path / name, 4, 3, pieces)
        values = tokens.scores(torch.tensor([[[0, 1]]]), torch.tensor([[[2]]])).flatten()
        assert (values / math.log(10)).tolist() == pytest.approx([-0.3 + unknown, end])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"mmap lm http://kheafield.com/code format version 5\n\0",
            "a binary of KenLM: give the ARPA",
        ),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ],
)
def test_what_is_taken_for_arpa_is_named(tmp_path, content, message):
    (tmp_path / "lm.arpa").write_bytes(content)
    for load in (load_word_ngrams, lambda path: load_ngrams(path, 4, 3)):
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "lm.arpa")


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (["cat", "bird", "x", "<eos>"], "`sat` must be a piece of the tokenizer"),
        (["cat", "sat", "sat", "<eos>"], "`sat` must be a piece of the tokenizer"),
        (["bird", "sat", "x", "<eos>"], "`cat` must be a token id below 4.*`lm_unit` word"),
    ],
)
def test_units_that_the_tokenizer_lacks_are_refused(tmp_path, pieces, message):
    (tmp_path / "lm.arpa").write_text(TEXT)
    with pytest.raises(ValueError, match=message):
        load_ngrams(tmp_path / "lm.arpa", 4, 3, pieces)
