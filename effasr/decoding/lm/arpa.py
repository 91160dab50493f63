"""Reader of ARPA files, the text form of back-off n-gram models."""

import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from effasr.data.manifest.lines import numbered_lines
from effasr.untrusted.files import open_regular

BEGIN = -1  # the id of ``<s>``

UNSEEN = -100.0  # log10 probability of an unknown word in a model without ``<unk>``, as in KenLM

MOST_DIGITS = 18  # digits of an integer, which fits into 64 bits

# What KenLM and SRILM separate words by; a word may have other spaces, such as U+00A0.
_BLANK = " \t\r\n"

_SPECIAL = {"<UNK>": "<unk>", "<S>": "<s>", "</S>": "</s>"}
"""Forms that other programs write."""

_BINARY = {
    b"mmap lm ": "a binary of KenLM: give the ARPA file that it was built from",
    b"version https://git-lfs": "a pointer of git-lfs: fetch the file by `git lfs pull`",
}
"""First bytes of what people take for an ARPA file."""

Context = tuple[int, ...]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arpa:
    # N-grams by length, from 1 on, with log10 of probability and of back-off weight; those with
    # ``<unk>`` are left out.
    ngrams: list[dict[Context, tuple[float, float]]]
    unknown: float  # log10 of the probability of an unknown word
    has_end: bool  # whether there is a probability of the end, ``</s>``


def read_arpa(path: str | Path, id_of: Callable[[str, str], int]) -> Arpa:
    """Read an ARPA file, plain or gzipped; ``id_of`` takes the line, for messages, and a word."""
    path = Path(path)
    ngrams: list[dict[Context, tuple[float, float]]] = []
    promised: list[int] = []
    counts: list[int] = []
    unknown, section, has_end = None, "", False
    for number, line in _lines(path):
        if line.startswith("\\"):
            section = line
            if section.endswith("-grams:"):
                ngrams.append({})
                counts.append(0)
            continue
        if section == "\\data\\":
            promised.append(_count(path, number, line))
        elif section == f"\\{len(ngrams)}-grams:":
            gram, probability, backoff = _entry(path, number, line, len(ngrams))
            counts[-1] += 1
            # A probability of 1 stands for none.
            has_end |= gram == ["</s>"] and probability < 0
            if gram == ["<unk>"]:
                unknown = probability
            elif "<unk>" not in gram:
                ids = tuple(id_of(f"{path}:{number}", word) for word in gram)
                ngrams[-1][ids] = probability, backoff
        elif section:
            raise ValueError(f"{path}:{number}: `{section}` is no section of an ARPA file.")
    if section != "\\end\\" or not ngrams or not ngrams[0]:
        raise ValueError(
            f"{path} must be an ARPA file, from \\data\\ to \\end\\, but ends in "
            f"{section or 'no section'}: KenLM's lmplz and SRILM write such files."
        )
    if counts != promised:
        raise ValueError(f"{path}: \\data\\ promises {promised} n-grams, but there are {counts}.")
    if not has_end:
        _log.warning("%s has no </s>, so the ends of texts have no score.", path)
    if unknown is None:
        _log.warning("%s has no <unk>, so unknown words are all but forbidden.", path)
    return Arpa(ngrams, UNSEEN if unknown is None else unknown, has_end)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file.")
    if path.is_file():
        with open_regular(path) as file:
            begin = file.read(32)
        for first, kind in _BINARY.items():
            if begin.startswith(first):
                raise ValueError(f"{path} must be an ARPA file, plain or .gz, but is {kind}.")
    try:
        for number, line in numbered_lines(path):
            yield number, line.strip(_BLANK)
    except ValueError as error:
        raise ValueError(
            f"{path} must be an ARPA file, plain or .gz, but is not: {error}"
        ) from None


def _count(path: Path, number: int, line: str) -> int:
    """Parse a line like ``ngram 2=120``."""
    name, equals, count = line.partition("=")
    count = count.strip()
    is_number = count.isdecimal() and len(count) <= MOST_DIGITS
    if not (name.startswith("ngram ") and equals and is_number):
        raise ValueError(f"{path}:{number} must be like `ngram 1=120`, but is `{line[:60]}`.")
    return int(count)


def _entry(path: Path, number: int, line: str, length: int) -> tuple[list[str], float, float]:
    """Return the words of a line, and log10 of their probability and of their back-off weight."""
    parts = re.split(f"[{_BLANK}]+", line)
    try:
        probability = float(parts[0])
        backoff = float(parts[1 + length]) if len(parts) == 2 + length else 0.0
        if (
            len(parts) not in (1 + length, 2 + length)
            or not -math.inf < probability <= 0
            or not math.isfinite(backoff)
        ):
            raise ValueError
    except (ValueError, IndexError):
        raise ValueError(
            f"{path}:{number} must be a log-probability, {length} words and perhaps a back-off "
            f"weight, but is `{line[:60]}`."
        ) from None
    words = [_SPECIAL.get(word, word) for word in parts[1 : 1 + length]]
    return words, probability, backoff
