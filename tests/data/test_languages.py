"""Languages by any of their names."""

import pytest

from effasr.data.languages import UnknownLanguageError, language_among, language_code
from effasr.data.prompt import Prompt


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *((name, "en") for name in ("en", "EN", "en-US", "en_us", "eng", "English", " ENGLISH ")),
        *((name, "en") for name in ("en_US.UTF-8", "<|en|>", "en-Latn-GB", "English (US)")),
        *((name, "de") for name in ("deu", "ger", "german", "Deutsch", "de-AT", "de_DE@euro")),
        *((name, "zh") for name in ("zh-Hant-TW", "zh-CN", "cmn", "Mandarin", "中文")),
        *((name, "yue") for name in ("zh-yue", "Cantonese", "yue")),
        *((name, "pt") for name in ("pt-BR", "pt_PT", "Portuguese", "português")),
        *((name, "es") for name in ("es-419", "castilian", "Español")),
        *((name, "no") for name in ("nb", "nb-NO", "norwegian", "nob")),
        *((name, "ht") for name in ("Haitian Creole", "haitian_creole")),
        ("iw", "he"), ("jw", "jv"), ("fil", "tl"), ("nn", "nn"), ("xyz", "xyz"), ("xyz-QQ", "xyz"),
        ("x-singlish", "x-singlish"), ("auto", "auto"),
    ],
)  # fmt: skip
def test_every_name_has_one_code(name, code):
    assert language_code(name) == code
    assert Prompt(name, name) == Prompt(code, code)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("englsh", "'english'"), ("germn", "'german'"), ("Portugese", "'portuguese'")],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(UnknownLanguageError, match=f"perhaps {nearest}: known are .*, en, .*x-"):
        Prompt(name, name)
    with pytest.raises(UnknownLanguageError, match="but is 'klingon': known are"):
        language_code("klingon")


def test_a_name_among_those_of_a_tokenizer():
    known = ("de-DE", "en-GB", "en-US", "jw", "x-singlish")
    assert language_among("en-US", known, "text") == "en-US"
    assert language_among("english", known, "text") == "en-GB"
    assert language_among("javanese", known, "text") == "jw"
    assert language_among("jv", known, "text") == "jw"
    assert language_among("deutsch", known, "text") == "de-DE"
    with pytest.raises(UnknownLanguageError, match=r"must be one of de-DE, .*, but is 'fr': name"):
        language_among("fr", known, "text")
    with pytest.raises(UnknownLanguageError, match="but is 'german', perhaps 'germane'"):
        language_among("german", ("germane", "en"), "speech")
