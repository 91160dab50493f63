import builtins

import pytest

from effasr.evaluation.normalizer import get_normalizer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello, World!", "hello world"),
        ("  two\tspaces \n", "two spaces"),
        ("Don't stop", "don't stop"),
        ("Don\u2019t stop", "don't stop"),
        ("the dogs' 'quoted' bone", "the dogs quoted bone"),
        ("well-known", "well known"),
        ("¿Qué tal, señor?", "qué tal señor"),
        ("Grüße, Ärger", "grüße ärger"),
        ("cafe\u0301", "caf\u00e9"),
        ("Привет, Мир!", "привет мир"),
        ("नमस्ते, दुनिया।", "नमस्ते दुनिया"),
        ("你好,世界。", "你好 世界"),
        ("\uff21\uff22\uff23", "abc"),  # full-width letters
        ("50% of $20", "50 of 20"),
        ("a\ue000b", "a b"),
        ("", ""),
        ("...", ""),
    ],
)
def test_basic(text, expected):
    basic = get_normalizer("basic")
    assert basic(text) == expected
    assert basic(expected) == expected


def test_none_and_whisper_english():
    assert get_normalizer("none")(" A,  b! ") == " A,  b! "
    pytest.importorskip("whisper_normalizer")
    normalize = get_normalizer("whisper_english")
    assert normalize("He's got twenty-five dollars, Mr. Smith") == ("he has got $25 mister smith")


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    actual = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("whisper_normalizer"):
            raise ImportError(name)
        return actual(name, *args, **kwargs)

    get_normalizer.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="pip install whisper-normalizer"):
        get_normalizer("whisper_english")
    message = "basic, whisper_english, open_asr_leaderboard_v1, but is 'chime'"
    with pytest.raises(ValueError, match=message):
        get_normalizer("chime")


def test_the_leaderboards_first_is_that_of_transformers():
    """transformers has it, but brings no table of spellings: the same as Whisper's is given."""
    whisper = pytest.importorskip("whisper_normalizer.english")
    theirs = pytest.importorskip("transformers.models.whisper.english_normalizer")
    expected = theirs.EnglishTextNormalizer(whisper.EnglishSpellingNormalizer().mapping)
    ours, plain = get_normalizer("open_asr_leaderboard_v1"), get_normalizer("whisper_english")
    texts = [
        "I kinda dunno 'cause it's sorta late, Mr. Smith!",
        "Uh, we won't pay $20 million and seven cents [laughs] (coughs)",
        "The colour of two hundred and five centres; twenty-first of May, 1,234.5 %",
        "<unk> they'd been gonna y'all o'clock A.B.C. naïve Straße",
        "one oh one double seven point five",
        "",
    ]
    assert [ours(text) for text in texts] == [expected(text) for text in texts]
    assert ours(texts[0]) != plain(texts[0])
    assert [ours(text) for text in texts[1:]] == [plain(text) for text in texts[1:]]
