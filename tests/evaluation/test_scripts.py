"""Scores of texts in any script: invisible characters, widths, cases, languages without spaces."""

import json

import pytest

from effasr.evaluation.alignment import align
from effasr.evaluation.comparison import read_run
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.result import Evaluation, ScoredUtterance, save
from effasr.evaluation.tables import wer_table
from effasr.evaluation.wer import count_errors, split_words, total

INVISIBLE = list("\ufeff\u200b\u200c\u200d\u200e\u202e\u2066\u00ad\ufe0f")


@pytest.mark.parametrize("name", ["basic", "whisper_english"])
@pytest.mark.parametrize("invisible", INVISIBLE)
def test_invisible_characters_are_no_errors(name, invisible):
    if name == "whisper_english":
        pytest.importorskip("whisper_normalizer")
    normalize = get_normalizer(name)
    text = f"{invisible}so{invisible}me words{invisible} \u2764{invisible}"
    assert normalize(text) == normalize("some words \u2764")


def test_texts_of_english_are_normalised_as_by_whisper():
    whisper = pytest.importorskip("whisper_normalizer.english")
    for text in ("He's Mr. Smith", "caf\u00e9 \u2019tis", "\uff21\uff22"):
        expected = whisper.EnglishTextNormalizer()(text)
        assert get_normalizer("whisper_english")(text) == expected


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("tr", "I\u015eIK \u0130Z", "\u0131\u015f\u0131k iz"),
        ("tr-TR", "ISI", "\u0131s\u0131"),
        ("az", "QIZ", "q\u0131z"),
        ("en", "ISI \u0130Z", "isi iz"),
        ("", "ISI", "isi"),
    ],
)
def test_turkish_cases(language, text, expected):
    assert get_normalizer("basic", language)(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("two words", ["two", "words"]),
        ("\u4f60\u597d \u4e16\u754c", ["\u4f60", "\u597d", "\u4e16", "\u754c"]),
        ("\u7528iphone 12\u7684", ["\u7528", "iphone", "12", "\u7684"]),
        ("\u3053\u30fc\u3072\u30fc", ["\u3053", "\u30fc", "\u3072", "\u30fc"]),
        # Vowel signs and tones belong to their letter.
        ("\u0e17\u0e35\u0e48\u0e19\u0e35\u0e48", ["\u0e17\u0e35\u0e48", "\u0e19\u0e35\u0e48"]),
        ("\u1780\u17b6\u179a", ["\u1780\u17b6", "\u179a"]),
        ("\ud55c\uad6d\uc5b4 \ub9d0", ["\ud55c\uad6d\uc5b4", "\ub9d0"]),
        ("\u0939\u093f\u0928\u094d\u0926\u0940", ["\u0939\u093f\u0928\u094d\u0926\u0940"]),
        ("", []),
    ],
)
def test_words_of_scripts_without_spaces_are_letters(text, words):
    assert split_words(text) == words


def test_spaces_in_chinese_are_no_errors():
    spaced, plain = "\u4f60 \u597d \u4e16\u754c iphone x", "\u4f60\u597d\u4e16\u754ciphone x"
    counts = count_errors(plain, spaced)
    assert (counts.errors, counts.character_errors) == (0, 0)
    assert counts.characters == len(plain)
    wrong = count_errors("\u4f60\u597d\u4e16\u754c", "\u4f60\u597d\u65f6\u754c")
    assert (wrong.substitutions, wrong.words) == (1, 4)
    assert wrong.main_rate == ("CER", 0.25)
    # One rate for a set, that of most of its characters.
    english = count_errors("a few words of english in it", "a few words of english")
    assert english.main_rate[0] == "WER"
    assert total([wrong, english]).main_rate[0] == "WER"
    assert align("\u4f60\u597d", "\u4f60 \u4eec").kinds == ("", "S")


def test_files_and_tables_have_the_main_rate_and_the_language(tmp_path):
    texts = ("\u4f60\u597d\u4e16\u754c", "\u4f60 \u597d \u65f6\u754c")
    scored = ScoredUtterance("a", "zh", *texts, 1.0, count_errors(*texts))
    turkish = ("ISI", "\u0131s\u0131")
    errors = count_errors(*map(get_normalizer("basic", "tr"), turkish))
    evaluation = Evaluation("basic", (scored, ScoredUtterance("b", "tr", *turkish, 1.0, errors)))
    assert "interval of the CER" in wer_table(evaluation)
    save(evaluation, tmp_path / "x" / "set")
    assert json.loads((tmp_path / "x" / "set" / "wer.json").read_text())["rate"] == "cer"
    (read,) = read_run(tmp_path / "x" / "set")
    assert read.counts == {"a": scored.errors, "b": errors}
    assert errors.errors == 0
    assert "\u4f60 \u597d \u65f6 \u754c (a)" in (tmp_path / "x" / "set" / "hyp.trn").read_text()
