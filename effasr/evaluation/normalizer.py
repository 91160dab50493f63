"""Text normalisation before word error rates are computed."""

import re
import unicodedata
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, get_args

NormalizerName = Literal["none", "basic", "whisper_english", "open_asr_leaderboard_v1"]

_APOSTROPHES = str.maketrans({"\u2019": "'", "\u02bc": "'"})
_INNER_APOSTROPHE = re.compile(r"(?<=\w)'(?=\w)")
_KEPT = "\ue000"  # placeholder of an apostrophe inside a word; a private-use character


# Variation selectors, which are marks, and choose among forms of a character.
_INVISIBLE = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]")
_DOTTED = ("tr", "az")  # languages in which I is the capital of a dotless letter
_CASING = str.maketrans({"I": "\u0131", "\u0130": "i"})


@cache
def get_normalizer(name: str, language: str = "") -> Callable[[str], str]:
    """Return the function of a name; ``basic`` lowers the case of a ``language``, such as tr."""
    if name == "none":
        return str
    if name == "basic":
        return partial(basic, language=language)
    if name == "whisper_english":
        normalizer = _english_normalizer("whisper_english")
        return lambda text: normalizer(without_format_characters(text))
    if name == "open_asr_leaderboard_v1":
        # Whisper's normaliser without the rules for four colloquial words, as in the first versions
        # of github.com/huggingface/open_asr_leaderboard. Later ones have rules that are not here:
        # compare only with its early results.
        normalizer = _english_normalizer("open_asr_leaderboard_v1")
        for word in ("kinda", "sorta", "dunno", "cause"):
            # Older versions of the package have some of the rules not.
            normalizer.replacers.pop(rf"\b{word}\b", None)
        return lambda text: normalizer(without_format_characters(text))
    choices = ", ".join(get_args(NormalizerName))
    raise ValueError(f"`normalizer` must be one of {choices}, but is {name!r}.")


def basic(text: str, language: str = "") -> str:
    """Lower-case letters, no punctuation or symbols, single spaces; for any script.

    Accents, vowel signs and apostrophes inside words ("don't"), in either of their common forms,
    are kept. Compatibility forms such as full-width letters become plain. Format characters, such
    as joiners, marks of direction and U+FEFF, are removed.
    """
    text = unicodedata.normalize("NFKC", without_format_characters(text))
    if re.split("[-_]", language.lower())[0] in _DOTTED:
        text = text.translate(_CASING)
    # The lower case of the Turkish capital has a combining dot.
    text = text.lower().replace("i\u0307", "i").translate(_APOSTROPHES)
    text = _INNER_APOSTROPHE.sub(_KEPT, text.replace(_KEPT, " "))
    bare = "".join(" " if unicodedata.category(c)[0] in "PS" else c for c in text)
    return " ".join(bare.replace(_KEPT, "'").split())


def without_format_characters(text: str) -> str:
    """Remove what has no form of its own: Unicode's category Cf, and variation selectors."""
    if text.isascii():
        return text
    return "".join(c for c in _INVISIBLE.sub("", text) if unicodedata.category(c) != "Cf")


def _english_normalizer(name: str) -> Any:
    try:
        from whisper_normalizer.english import EnglishTextNormalizer
    except ImportError as error:
        raise ValueError(
            f"`normalizer` {name} needs the package whisper-normalizer, which is not installed: "
            "pip install whisper-normalizer, or use normalizer basic."
        ) from error
    return EnglishTextNormalizer()
