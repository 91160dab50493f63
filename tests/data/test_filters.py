import numpy as np
import pytest

from effasr.data.filters.rules import (
    Limits,
    Reason,
    RejectedUtterance,
    check,
    frames_for_ctc,
    rate_outliers,
)
from effasr.data.manifest.reader import read


@pytest.fixture
def cut_of(tmp_path, write_tone, write_lines):
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
        ({"text": ""}, {}, Reason.EMPTY_TEXT, "the text is empty"),
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
        ({}, {"max_tokens_per_second": 0.5}, Reason.TOKEN_RATE, r"\d\.\d per second, over 0\.5"),
    ],
)
def test_reasons(cut_of, tokenizer, cut, limits, reason, details):
    with pytest.raises(RejectedUtterance, match=details) as caught:
        check(cut_of(**cut), Limits(**limits), tokenizer)
    assert caught.value.reason == reason


def test_a_good_cut_gives_its_tokens(cut_of, tokenizer):
    cut = cut_of()
    tokens = check(cut, Limits(frame_budget=25, token_budget=30), tokenizer)
    assert tokens is not None
    assert tokens.text == tokenizer.encode("one two", "en")
    assert len(tokens.prompt) == 5
    assert tokens.monotonic


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
    result = np.flatnonzero(rate_outliers(rates, durations))
    np.testing.assert_array_equal(result, wrong)


def test_rates_are_compared_within_a_language():
    rng = np.random.default_rng(0)
    languages = np.repeat([0, 1], [1000, 20])
    rates = np.where(languages == 0, 4.0, 15.0) * np.exp(rng.normal(0, 0.2, 1020))
    durations = rng.uniform(2, 6, 1020)
    rates[7] = 40.0
    result = np.flatnonzero(rate_outliers(rates, durations, languages=languages))
    np.testing.assert_array_equal(result, [7])


def test_equal_rates_have_no_outliers():
    assert not rate_outliers(np.full(500, 5.0), np.linspace(1, 9, 500)).any()
    # Hardly faster, though many standard deviations away.
    assert not rate_outliers(np.append(np.full(500, 5.0), 5.5), np.linspace(1, 9, 501)).any()
    assert rate_outliers(np.zeros(0), np.zeros(0)).shape == (0,)
