"""Words of scripts with and without spaces between words."""

import re
import unicodedata
from functools import cache

# Thai, Lao, Tibetan, Burmese, Khmer, kana and Han: a range of a character class.
UNSPACED = (
    "\u0e00-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
UNSPACED_CHARACTER = re.compile(f"[{UNSPACED}]")


def split_words(text: str) -> list[str]:
    """Return the units that word errors count, of a normalised text.

    They are words between white space; in scripts without spaces, each letter with its marks.
    """
    if not UNSPACED_CHARACTER.search(text):
        return text.split()
    return [unit for word in text.split() for unit in _unit().findall(word)]


@cache
def _unit() -> re.Pattern[str]:
    blocks = *range(0x0E00, 0x10A0), *range(0x1780, 0x1800), 0x3099, 0x309A
    marks = "".join(chr(code) for code in blocks if unicodedata.category(chr(code))[0] == "M")
    return re.compile(f"[^{UNSPACED}]+|[{UNSPACED}][{marks}]*")
