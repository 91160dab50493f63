"""What `effasr prepare --clean` does to texts, in the order in which it is named."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

Clean = Callable[[str], str]

# Within words they are letters: don't, well-known.
_WITHIN_WORDS = re.compile(r"(?<=\w)['\u2019\-](?=\w)")
_PLACEHOLDER = "\ue000"
_TAGS = re.compile(r"tags=(\S+?)\.\.\.(\S+)")

TRANSFORMS = "lower, no-punctuation, tags=<...> (or another pair of brackets)"


def parse_clean(text: str) -> Clean:
    """Return the transforms of a list such as ``tags=<...>,no-punctuation,lower`` as one."""
    transforms: list[Clean] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        tags = _TAGS.fullmatch(name)
        if name == "lower":
            transforms.append(str.lower)
        elif name == "no-punctuation":
            transforms.append(_without_punctuation)
        elif tags is not None:
            pattern = re.compile(f"{re.escape(tags[1])}.*?{re.escape(tags[2])}")
            transforms.append(lambda text, pattern=pattern: pattern.sub(" ", text))
        else:
            raise ValueError(f"must be some of {TRANSFORMS}, but one is {name!r}")

    def clean(text: str) -> str:
        for transform in transforms:
            text = transform(text)
        return " ".join(text.split())

    return clean


def _without_punctuation(text: str) -> str:
    kept = _WITHIN_WORDS.findall(text)
    marked = _WITHIN_WORDS.sub(_PLACEHOLDER, text)
    plain = "".join(" " if unicodedata.category(c).startswith("P") else c for c in marked)
    for character in kept:
        plain = plain.replace(_PLACEHOLDER, character, 1)
    return plain
