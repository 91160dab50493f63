"""Parts of a recording from the subtitles or the word times beside it: SRT, WebVTT and CTM."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from effasr.data.manifest.lines import numbered_lines

_TIME = r"(?:(\d+):)?(\d{1,2}):(\d{2})[.,](\d{1,3})"
_TIMES = re.compile(rf"{_TIME}\s*-->\s*{_TIME}")
_MARKUP = re.compile(r"<[^>]*>|\{\\[^}]*\}")
# Words of CTM that are closer, and no longer together, are one part.
_PAUSE_S, _LONGEST_S = 0.6, 20.0


@dataclass(frozen=True, slots=True)
class Part:
    """A text with its place in the recording."""

    start: float  # seconds
    end: float
    text: str


def read(path: Path) -> Iterator[Part | str]:
    """Yield the parts of a file, or why a line is none."""
    return _ctm(path) if path.suffix == ".ctm" else _cues(path)


def _cues(path: Path) -> Iterator[Part | str]:
    times: tuple[float, float] | None = None
    words: list[str] = []
    previous, is_note = "", False
    for _, line in _lines_with_blanks(path):
        match = _TIMES.search(line)
        if match is not None or not line:
            # The line before the times is a number or a name, even where no blank line is.
            if match is not None and words and words[-1] == previous and previous.isdigit():
                words.pop()
            if times is not None and words:
                yield _part(*times, words, path)
            words, is_note = [], False
            times = None if match is None else (_seconds(match, 1), _seconds(match, 5))
        elif times is not None and not is_note:
            words.append(line)
        previous = line
    if times is not None and words:
        yield _part(*times, words, path)


def _part(start: float, end: float, words: list[str], path: Path) -> Part | str:
    text = " ".join(_MARKUP.sub("", " ".join(words)).split())
    if end <= start:
        return f"{path}: a cue must end after it begins, but is {start:g} to {end:g} s: {text!r}."
    return Part(start, end, text)


def _lines_with_blanks(path: Path) -> Iterator[tuple[int, str]]:
    before = 0
    for number, line in numbered_lines(path):
        if number > before + 1:
            yield number, ""
        yield number, line.strip()
        before = number


def _seconds(match: re.Match[str], group: int) -> float:
    hours, minutes, seconds, fraction = match.group(group, group + 1, group + 2, group + 3)
    return int(hours or 0) * 3600 + int(minutes) * 60 + int(seconds) + float(f"0.{fraction}")


def _ctm(path: Path) -> Iterator[Part | str]:
    """Join the words of ``recording channel start duration word`` between pauses."""
    start = end = 0.0
    words: list[str] = []
    for number, line in numbered_lines(path):
        fields = line.split()
        if fields[0].startswith(";;"):
            continue
        try:
            begin, duration, word = float(fields[2]), float(fields[3]), fields[4]
        except (IndexError, ValueError):
            yield f"{path}:{number}: must be `recording channel start duration word`."
            continue
        is_new = begin - end > _PAUSE_S or begin + duration - start > _LONGEST_S
        if words and is_new:
            yield Part(start, end, " ".join(words))
            words = []
        if not words:
            start = begin
        words.append(word)
        end = begin + duration
    if words:
        yield Part(start, end, " ".join(words))
