import pytest

from effasr.data.config import DataConfig
from effasr.data.filters.config import FilterConfig, TooManyDropped, check_share
from effasr.data.filters.rules import Dropped
from effasr.data.index.corpus import Corpus


@pytest.fixture
def load(tmp_path, write_tone, write_lines, tokenizer):
    """A corpus of one-second utterances with these lines, under these filters."""

    def make(rows, **filters):
        write_tone(tmp_path / "a.wav", 1.0)
        manifest = write_lines(
            tmp_path / "m.jsonl", [{"audio_filepath": "a.wav", "text": "one"} | row for row in rows]
        )
        config = DataConfig(
            frame_budget=100, token_budget=400, filters=FilterConfig(**{"max_dropped": 1} | filters)
        )
        return Corpus.load([manifest], tokenizer, config, ctc=False)

    return make


def reasons(corpus):
    return [str(drop.reason) for drop in corpus.dropped]


@pytest.mark.parametrize(
    ("filters", "row", "reason"),
    [
        (
            {"languages": ("en",)},
            {"lang": "de", "target_lang": "en", "task": "translate"},
            "unwanted_language",
        ),
        ({"characters": "a-z '"}, {"text": "one 2"}, "unwanted_characters"),
        (
            {"max_characters_per_second": 8.0},
            {"text": "one two three"},
            "character_rate_outlier",
        ),
        ({"max_tokens_per_second": 4.0}, {"text": "one two three four"}, "token_rate_outlier"),
    ],
)
def test_each_filter_takes_what_it_names_and_nothing_else(load, filters, row, reason):
    corpus = load([{}, row, {}], **filters)
    assert reasons(corpus) == [reason]
    assert len(corpus) == 2
    assert reasons(load([{}, row, {}])) == []


def test_outliers_among_texts_of_the_same_length(load):
    rows = [{"text": "one two" if index % 2 else "one"} for index in range(120)]
    rows[7]["text"] = "one two three four five six seven eight one two three four"
    corpus = load(rows, rate_deviations=4.0)
    (drop,) = corpus.dropped
    assert (drop.reason, drop.id) == ("token_rate_outlier", "a-8")
    assert "far more than others of 1.0 s" in drop.details
    assert len(corpus) == 119
    assert len(load(rows)) == 120


def test_a_reason_that_takes_too_much_stops_and_says_which_and_how_many(load):
    rows = [{"lang": "de"} if index < 3 else {} for index in range(10)]
    with pytest.raises(TooManyDropped, match=r"unwanted_language leaves out 3 of 10") as caught:
        load(rows, languages=("en",), max_dropped=0.29)
    assert len(caught.value.dropped) == 3
    assert "'de' is not among en" in str(caught.value)
    assert str(caught.value).endswith("data.filters.max_dropped=0.3.")
    assert len(load(rows, languages=("en",), max_dropped=0.3)) == 7


def test_shares_of_several_reasons_are_not_added():
    dropped = [Dropped(str(i), "ab"[i % 2], "", "") for i in range(10)]
    check_share(dropped, 50, 0.1)
    with pytest.raises(TooManyDropped, match="a leaves out 5 of 49"):
        check_share(dropped, 49, 0.1)
    check_share([], 0, 0.0)
    # In floating point 0.29 * 100 is less than 29.
    check_share([Dropped(str(i), "a", "", "") for i in range(29)], 100, 0.29)
