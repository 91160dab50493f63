"""Text normalisation before word error rates are computed."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any, Literal, get_args

NormalizerName = Literal["none", "basic", "whisper_english", "open_asr_leaderboard_v1"]

_APOSTROPHES = str.maketrans({"\u2019": "'", "\u02bc": "'"})
_INNER_APOSTROPHE = re.compile(r"(?<=\w)'(?=\w)")
_KEPT = "\ue000"  # placeholder of an apostrophe inside a word; a private-use character


def get_normalizer(name: str) -> Callable[[str], str]:
    if name == "none":
        return str
    if name == "basic":
        return basic
    if name == "whisper_english":
        return _whisper_english()
    if name == "open_asr_leaderboard_v1":
        return _open_asr_leaderboard_v1()
    choices = ", ".join(get_args(NormalizerName))
    raise ValueError(f"`normalizer` must be one of {choices}, but is {name!r}.")


def basic(text: str) -> str:
    """Lower-case letters, no punctuation or symbols, single spaces; for any script.

    Accents, vowel signs and apostrophes inside words ("don't"), in either of their common forms,
    are kept. Compatibility forms such as full-width letters become plain.
    """
    text = unicodedata.normalize("NFKC", text).lower().translate(_APOSTROPHES)
    text = _INNER_APOSTROPHE.sub(_KEPT, text.replace(_KEPT, " "))
    bare = "".join(" " if unicodedata.category(c)[0] in "PS" else c for c in text)
    return " ".join(bare.replace(_KEPT, "'").split())


def _whisper_english(name: str = "whisper_english") -> Any:
    try:
        from whisper_normalizer.english import EnglishTextNormalizer
    except ImportError as error:
        raise ValueError(
            f"`normalizer` {name} needs the package whisper-normalizer, which is not installed: "
            "pip install whisper-normalizer, or use normalizer basic."
        ) from error
    return EnglishTextNormalizer()


def _open_asr_leaderboard_v1() -> Callable[[str], str]:
    """Whisper's normaliser without the rules for four colloquial words.

    This is the ``EnglishTextNormalizer`` of the first versions of
    github.com/huggingface/open_asr_leaderboard, and of transformers: both lack kinda, sorta, dunno
    and cause. Later versions of the leaderboard have further rules that are not implemented here:
    compare only with its early results.
    """
    normalizer = _whisper_english("open_asr_leaderboard_v1")
    for word in ("kinda", "sorta", "dunno", "cause"):
        # Older versions of the package have some of the rules not.
        normalizer.replacers.pop(rf"\b{word}\b", None)
    return normalizer
