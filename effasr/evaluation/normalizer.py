"""What is done to both texts before their words are compared."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any, Literal, get_args

NormalizerName = Literal["none", "basic", "whisper_english", "open_asr_leaderboard_v1"]

_APOSTROPHES = str.maketrans({"\u2019": "'", "\u02bc": "'"})
_INNER_APOSTROPHE = re.compile(r"(?<=\w)'(?=\w)")
_KEPT = "\ue000"
"""Stands for an apostrophe inside a word while the others are removed; a private-use character."""


def get_normalizer(name: str) -> Callable[[str], str]:
    """Return the function of this name, which maps a text to the text that is scored.

    Args:
        name: ``none`` leaves the text as it is. ``basic`` serves every language: see `basic`.
            ``whisper_english`` is Whisper's, which also spells out numbers, contractions and
            British forms. ``open_asr_leaderboard_v1`` is what the Open ASR Leaderboard began with:
            see `_open_asr_leaderboard_v1`.

    Raises:
        ValueError: The name is unknown, or the package it needs is not installed.
    """
    if name == "none":
        return _unchanged
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

    Accents and vowel signs stay, and so does an apostrophe inside a word ("don't"), whichever of
    its two common forms it has. Compatibility forms such as full-width letters become plain.
    """
    text = unicodedata.normalize("NFKC", text).lower().translate(_APOSTROPHES)
    text = _INNER_APOSTROPHE.sub(_KEPT, text.replace(_KEPT, " "))
    bare = "".join(" " if unicodedata.category(c)[0] in "PS" else c for c in text)
    return " ".join(bare.replace(_KEPT, "'").split())


def _unchanged(text: str) -> str:
    return text


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

    That is the ``EnglishTextNormalizer`` of github.com/huggingface/open_asr_leaderboard in its
    first versions, and of transformers: both left out kinda, sorta, dunno and cause. Later versions
    of the leaderboard also remove more hesitations, join acronyms, write times and compounds in one
    way and map names by tables of their own, which is not done here: compare with its results of
    that time only.
    """
    normalizer = _whisper_english("open_asr_leaderboard_v1")
    for word in ("kinda", "sorta", "dunno", "cause"):
        # Older versions of the package have some of the rules not.
        normalizer.replacers.pop(rf"\b{word}\b", None)
    return normalizer
