"""Patterns of a tokenizer.json: a text is refused after 10 million retries of a match."""

import pytest

from effasr.data.tokenizer import load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
WORDS = {"a": 0, "!": 1, "<unk>": 2, "<pad>": 3}


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(?:a|aa)+$"])
@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer"])
def test_a_text_that_takes_exponential_time_is_refused(tmp_path, pattern, place):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    regex = tokenizers.Regex(pattern)
    if place == "normalizer":
        made.normalizer = tokenizers.normalizers.Replace(regex, "a")
    else:
        made.pre_tokenizer = tokenizers.pre_tokenizers.Split(regex, "isolated")
    made.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path)
    assert found.encode("a", "en") == [0]
    with pytest.raises(ValueError, match="retry-limit-in-match over") as failure:
        found.encode("a" * 5000 + "!", "en")
    assert "\n" not in str(failure.value)


def test_a_decoder_that_takes_exponential_time_is_refused(tmp_path):
    words = {"!" * 5000 + "a": 0, "a": 1, "<unk>": 2, "<pad>": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.decoder = tokenizers.decoders.Replace(tokenizers.Regex(r"(!+)+$"), "a")
    made.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path)
    assert found.decode([1]) == "a"
    with pytest.raises(ValueError, match="retry-limit-in-match over"):
        found.decode([0])
