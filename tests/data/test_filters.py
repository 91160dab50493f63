import numpy as np
import pytest

from effasr.data.config import DataConfig
from effasr.data.filters.config import FilterConfig, TooManyDropped, check_share
from effasr.data.filters.rules import (
    Dropped,
    Limits,
    Reason,
    RejectedUtterance,
    check,
    frames_for_ctc,
    rate_outliers,
)
from effasr.data.index.corpus import Corpus
from effasr.data.manifest.reader import read
from tests.support.corpora import write_lines, write_tone


@pytest.fixture
def cut_of(tmp_path):
    def make(text="one two", seconds=2.0, **fields):
        write_tone(tmp_path / "a.wav", seconds)
        row = {"audio_filepath": "a.wav", "text": text} | fields
        return read(write_lines(tmp_path / "m.jsonl", [row]))[0]

    return make


@pytest.mark.parametrize(
    ("cut", "limits", "reason", "details"),
    [
        ({"seconds": 0.05}, {}, Reason.TOO_SHORT, "0.050 s, under `min_duration` 0.1 s"),
        (
            {"seconds": 2.0},
            {"max_duration": 1.5},
            Reason.TOO_LONG,
            "over `max_duration` 1.5 s",
        ),
        ({"text": "  "}, {}, Reason.EMPTY_TEXT, "the text is empty"),
        (
            {},
            {"frame_budget": 24},
            Reason.FRAME_BUDGET,
            "frames, over `frame_budget` 24",
        ),
        ({}, {"token_budget": 5}, Reason.TOKEN_BUDGET, r"\d+ tokens, over `token_budget` 5"),
        ({"lang": "fr"}, {}, Reason.UNKNOWN_LANGUAGE, "must be one of de, en, but is 'fr'"),
        ({"text": "жц"}, {}, Reason.UNKNOWN_TEXT, "the vocabulary spells nothing of 'жц'"),
        (
            {"text": "four three two one", "seconds": 0.2},
            {},
            Reason.CTC_INFEASIBLE,
            r"CTC needs \d+ encoder frames for \d+ tokens, and there are 3",
        ),
    ],
)
def test_reasons(cut_of, tokenizer, cut, limits, reason, details):
    with pytest.raises(RejectedUtterance, match=details) as caught:
        check(cut_of(**cut), Limits(**limits), tokenizer)
    assert caught.value.reason == reason


def test_ctc_asks_nothing_of_translations_and_of_models_without_it(cut_of, tokenizer):
    long = {"text": "four three two one", "seconds": 0.2}
    assert check(cut_of(**long), Limits(ctc=False), tokenizer) is not None
    translated = check(cut_of(**long, lang="de", target_lang="en"), Limits(), tokenizer)
    assert translated is not None
    assert not translated.monotonic


def test_without_a_tokenizer_characters_are_counted(cut_of):
    assert check(cut_of(), Limits()) is None
    with pytest.raises(RejectedUtterance, match=r"3\.5 per second, over 3") as caught:
        check(cut_of(), Limits(max_characters_per_second=3))
    assert caught.value.reason == Reason.CHARACTER_RATE


@pytest.mark.parametrize(
    ("text", "frames"), [([], 0), ([4], 1), ([4, 5], 2), ([4, 4], 3), ([4, 4, 4, 5], 6)]
)
def test_frames_for_ctc(text, frames):
    assert frames_for_ctc(text) == frames


def test_outliers_are_found_among_utterances_of_their_length():
    rng = np.random.default_rng(0)
    durations = np.exp(rng.normal(1, 0.8, 3000))
    # Short utterances are spoken faster: their rates alone are no outliers.
    rates = 8 / np.sqrt(durations) * np.exp(rng.normal(0, 0.2, 3000))
    wrong = np.array([5, 700, 2999])
    rates[wrong] *= 6
    np.testing.assert_array_equal(np.flatnonzero(rate_outliers(rates, durations)), wrong)


@pytest.fixture
def load_lines(tmp_path, tokenizer):
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


@pytest.mark.parametrize(
    ("filters", "row", "reason"),
    [
        (
            {"languages": ("en",)},
            {"lang": "de", "target_lang": "en", "task": "translate"},
            "unwanted_language",
        ),
        ({"characters": "a-z '"}, {"text": "one 2"}, "unwanted_characters"),
        ({"max_characters_per_second": 8.0}, {"text": "one two three"}, "character_rate_outlier"),
        ({"max_tokens_per_second": 4.0}, {"text": "one two three four"}, "token_rate_outlier"),
    ],
)
def test_each_filter_takes_what_it_names_and_nothing_else(load_lines, filters, row, reason):
    corpus = load_lines([{}, row, {}], **filters)
    assert [str(drop.reason) for drop in corpus.dropped] == [reason]
    assert len(corpus) == 2
    assert [str(drop.reason) for drop in load_lines([{}, row, {}]).dropped] == []


def test_outliers_among_texts_of_the_same_length(load_lines):
    rows = [{"text": "one two" if index % 2 else "one"} for index in range(120)]
    rows[7]["text"] = "one two three four five six seven eight one two three four"
    corpus = load_lines(rows, rate_deviations=4.0)
    (drop,) = corpus.dropped
    assert (drop.reason, drop.id) == ("token_rate_outlier", "a-8")
    assert "far more than others of 1.0 s" in drop.details
    assert len(corpus) == 119
    assert len(load_lines(rows)) == 120


def test_a_reason_that_takes_too_much_stops_and_says_which_and_how_many(load_lines):
    rows = [{"lang": "de"} if index < 3 else {} for index in range(10)]
    with pytest.raises(TooManyDropped, match=r"unwanted_language leaves out 3 of 10") as caught:
        load_lines(rows, languages=("en",), max_dropped=0.29)
    assert len(caught.value.dropped) == 3
    assert "'de' is not among en" in str(caught.value)
    assert str(caught.value).endswith("data.filters.max_dropped=0.3.")
    assert len(load_lines(rows, languages=("en",), max_dropped=0.3)) == 7


def test_shares_of_several_reasons_are_not_added():
    dropped = [Dropped(str(i), "ab"[i % 2], "", "") for i in range(10)]
    check_share(dropped, 50, 0.1)
    with pytest.raises(TooManyDropped, match="a leaves out 5 of 49"):
        check_share(dropped, 49, 0.1)
    check_share([], 0, 0.0)
    # In floating point 0.29 * 100 is less than 29.
    check_share([Dropped(str(i), "a", "", "") for i in range(29)], 100, 0.29)
