"""Counts, frames per token, and the vocabulary that is chosen from them."""

import random

import numpy as np
import pytest

from effasr.data.features.frame_geometry import Framing
from effasr.data.prompt import Prompt
from effasr.data.statistics import guidance
from effasr.data.statistics.survey import SAMPLE, FramesPerToken, Survey, survey
from effasr.data.statistics.vocabulary import choose_vocabulary
from effasr.data.tokenizer import NeMoTokenizer, train_tokenizer
from tests.support.corpora import write_lines

EIGHT, FOUR = Framing(), Framing(subsampling=4)


def spoken(characters_per_second, count=400, language="en"):
    """Sentences of random words, read at a constant rate."""
    generator = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(generator.choices(letters, k=generator.randint(2, 7))) for _ in range(300)]
    result = Survey()
    for _ in range(count):
        text = " ".join(generator.choices(words, k=generator.randint(4, 12)))
        result.add(Prompt(language, language), text, len(text) / characters_per_second)
    return result


@pytest.mark.parametrize(
    ("ratios", "subsampling", "is_hard"),
    [
        ([3.0] * 10, 8, False),
        ([2.4] * 10, 8, True),
        ([2.5] * 10, 8, False),
        ([1.5] * 10, 4, False),
        ([1.4] * 10, 4, True),
        ([3.0] * 9 + [0.5], 8, True),
        ([3.0] * 9 + [0.5], 4, True),
    ],
)
def test_it_is_hard_by_median_or_without_a_path(ratios, subsampling, is_hard):
    frames = np.array([round(20 * ratio) for ratio in ratios])
    ratios = FramesPerToken.of(frames, np.full(len(ratios), 20))
    assert ratios.is_hard(Framing(subsampling=subsampling)) is is_hard


def test_a_survey_counts_by_language_and_keeps_a_bounded_sample():
    result = Survey()
    for number in range(SAMPLE + 500):
        result.add(Prompt("en", "en"), f"text {number}", 3.6, speaker=f"s{number % 3}")
    result.add(Prompt("nl", "nl"), "één", 36.0)
    result.add(Prompt("nl", "en", "translate"), "not in order", 7.2)
    assert result.utterances == SAMPLE + 502
    assert result.hours == pytest.approx((SAMPLE + 500) / 1000 + 0.01 + 0.002)
    assert (result.longest, len(result.speakers)) == (36.0, 3)
    english = result.languages["en"]
    assert len(english.texts) == len(english.seconds) == SAMPLE
    assert "not in order" not in english.texts
    # Each of the last 500 is in the sample with a probability of 0.95.
    assert 440 < sum(int(text.split()[1]) >= SAMPLE for text in english.texts) < 500
    assert result.characters == len(set("text0123456789één" + "notinorder"))


def test_texts_without_audio_give_way_to_speech():
    result = Survey()
    result.add_text("en", "only text")
    assert not result.languages["en"].has_speech
    assert result.languages["en"].texts == ["only text"]
    result.add(Prompt(), "speech", 1.0)
    result.add_text("en", "more text")
    assert result.languages["en"].texts == ["speech"]
    assert (result.utterances, result.languages["en"].utterances) == (1, 3)


def test_counts_and_samples_agree_with_the_tokenizer(tmp_path):
    sampled = spoken(12.0)
    texts = sampled.languages["en"].texts
    tokenizer = train_tokenizer({"en": texts}, tmp_path, vocab_size=60, model_type="bpe")
    counted = Survey()
    for text, seconds in zip(texts, sampled.languages["en"].seconds, strict=True):
        counted.add(Prompt(), text, seconds, tokens=tokenizer.encode(text, "en"))
    assert counted.counted(EIGHT) == sampled.sampled(tokenizer, EIGHT)
    # One vocabulary for all languages names none.
    any_language = NeMoTokenizer({"tokenizer": tokenizer.models["en"]})
    assert any_language.languages == ()
    assert counted.counted(EIGHT) == sampled.sampled(any_language, EIGHT)
    item = [len(text) / 12 * 12.5 / len(tokenizer.encode(text, "en")) for text in texts]
    result = counted.counted(EIGHT)
    assert result is not None
    assert result.median == pytest.approx(np.median(item), rel=0.03)
    assert sampled.counted(EIGHT) is None


def test_slow_speech_has_the_usual_vocabulary_and_fast_speech_finer_frames():
    slow = choose_vocabulary(spoken(3.0))
    assert (slow.sizes, slow.subsampling, slow.is_hard) == ({"en": 40}, 8, False)
    fast = choose_vocabulary(spoken(14.0))
    assert (fast.sizes, fast.subsampling, fast.is_hard) == ({"en": 40}, 4, False)
    faster = choose_vocabulary(spoken(22.0))
    assert (faster.sizes["en"] >= 128, faster.subsampling, faster.is_hard) == (True, 4, False)
    assert choose_vocabulary(spoken(14.0)) == fast
    # No size suffices at 8x: not the one with the most frames, but the first that CTC can align.
    aligned = choose_vocabulary(spoken(9.0), subsampling=8)
    assert (aligned.sizes, aligned.is_hard) == ({"en": 40}, True)
    stays = choose_vocabulary(spoken(14.0), subsampling=8)
    assert (stays.subsampling, stays.is_hard) == (8, True)
    assert stays.frames_per_token.median < fast.frames_per_token.median


def test_a_larger_vocabulary_needs_examples():
    few, many = (choose_vocabulary(spoken(12.0, count), subsampling=8) for count in (60, 3000))
    assert few.sizes["en"] == 128
    assert many.sizes["en"] > 128
    assert many.frames_per_token.median > few.frames_per_token.median


def test_a_writing_with_many_characters_has_a_piece_for_each():
    result, generator = Survey(), random.Random(0)
    for _ in range(500):
        text = "".join(chr(generator.randrange(0x4E00, 0x4E00 + 700)) for _ in range(12))
        result.add(Prompt("zh", "zh"), text, 4.0)
    choice = choose_vocabulary(result)
    assert choice.sizes["zh"] >= 700
    assert (choice.subsampling, choice.is_hard) == (8, False)


def test_characters_outside_the_sample_have_pieces_as_well():
    result = spoken(3.0)
    # As if the texts with these had not been sampled.
    result.languages["en"].characters.update(map(chr, range(0x4E00, 0x4E00 + 700)))
    assert choose_vocabulary(result).sizes["en"] > 700


def test_languages_have_sizes_of_their_own_and_text_alone_has_one():
    result = spoken(12.0, 3000)
    for text in ["ein text", "noch ein text"] * 40:
        result.add_text("de", text)
    choice = choose_vocabulary(result, subsampling=8)
    assert set(choice.sizes) == {"de", "en"}
    assert choice.sizes["en"] > 128
    with pytest.raises(ValueError, match="`survey` must have texts"):
        choose_vocabulary(Survey())


def test_a_warning_names_what_helps_and_fits_the_terminal():
    result = spoken(14.0)
    hard = FramesPerToken(1.25, 0.99, 0.03, 400)
    good = FramesPerToken(2.6, 0.0, 0.0, 400)

    def warn(framing, with_subsampling, **options):
        lines = guidance.warn_about_alignment(
            hard, framing, with_subsampling=with_subsampling, **options
        )
        assert all(len(line) <= 100 for line in lines)
        return " ".join(line.strip() for line in lines)

    surveyed = {"survey": lambda: result}
    text = warn(EIGHT, lambda other: good if other == 4 else None, **surveyed)
    assert text.startswith("warning: CTC learns late or not at all")
    assert "model.encoder.subsampling=4 (median 2.6)" in text
    both = warn(EIGHT, lambda other: hard, **surveyed)
    assert "model.encoder.subsampling=4 with a tokenizer with --vocab-size" in both
    assert "leave model.ctc false" in warn(FOUR, lambda other: None)


def test_lines_of_people_are_short():
    result = spoken(14.0)
    for language in ("de", "fr", "es", "it", "nl", "pl", "pt", "sv"):
        result.add(Prompt(language, language), "x" * 9, 36_000_000.0, speaker=language)
    line = guidance.describe_counts(result)
    assert len(line) <= 100
    assert "(9 languages)" in line
    assert "8 speakers" in line
    aligned = guidance.describe_alignment(FramesPerToken(12.25, 0.0004, 1.0, 9), EIGHT)
    assert len(aligned) <= 100
    assert "under 2 in under 0.1 %" in aligned


def test_a_survey_of_manifests_opens_no_audio_that_it_need_not(tmp_path):
    path = tmp_path / "m.jsonl"
    row = {"audio_filepath": "gone.wav", "duration": 1.5, "speaker": "x"}
    write_lines(path, [row | {"text": f"text {n}"} for n in range(5)])
    assert survey([path, path], most=3).utterances == 6
    assert survey([path]).hours == pytest.approx(7.5 / 3600)
    assert survey([path]).speakers == {"x"}
