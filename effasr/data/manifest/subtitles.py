"""Parts of a recording from the subtitles or the word times beside it: SRT, WebVTT and CTM."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from effasr.data.manifest.lines import check_text, numbered_lines

_TIME = r"(?:(\d+):)?(\d{1,2}):(\d{2})[.,](\d{1,3})"
_TIMES = re.compile(rf"{_TIME}\s*-->\s*{_TIME}")
# Such as 00:00:01.5 -> 00:00:03: the beginning of a cue that cannot be read.
_UNREADABLE = re.compile(r"\d+:[\d:.,\s]*-+>")
_NO_CUES = ("WEBVTT", "NOTE", "STYLE", "REGION")  # paragraphs of WebVTT that are none
_MARKUP = re.compile(r"<[^>]*>|\{\\[^}]*\}")
# Words of CTM that are closer, and no longer together, are one part.
_PAUSE_S, _LONGEST_S = 0.6, 20.0


@dataclass(frozen=True, slots=True)
class Part:
    """A text with its place in the recording."""

    start: float  # seconds
    end: float
    text: str
    channel: int | None = None  # from 0; None for all


def read(path: Path, recording: str) -> Iterator[Part | str]:
    """Yield the parts of a file, or why a line is none."""
    return _ctm(path, recording) if path.suffix.lower() == ".ctm" else _cues(path)


def _cues(path: Path) -> Iterator[Part | str]:
    times: tuple[float, float] | None = None
    words: list[str] = []
    outside: list[tuple[int, str]] = []  # lines of a paragraph before its times
    previous = ""
    for number, line in [*_lines_with_blanks(path), (0, "")]:
        match = _TIMES.search(line)
        is_unreadable = match is None and _UNREADABLE.match(line) is not None
        if match is not None or is_unreadable or not line:
            # The line before the times is a number or a name, even where no blank line is.
            if line and words and words[-1] == previous and previous.isdigit():
                words.pop()
            if times is not None:
                yield _part(*times, words, path)
            elif not line and outside and not outside[0][1].startswith(_NO_CUES):
                for at, text in [row for row in outside if not row[1].isdigit()][:1]:
                    yield f"{path}:{at}: has no times that can be read: {text[:60]!a}."
            words, outside = [], []
            times = None if match is None else (_seconds(match, 1), _seconds(match, 5))
        elif times is not None:
            words.append(line)
        if line and times is None:
            outside.append((number, line))
        previous = line


def _part(
    start: float, end: float, words: list[str], path: Path, channel: int | None = None
) -> Part | str:
    text = " ".join(_MARKUP.sub("", " ".join(words)).split())
    if end <= start:
        return f"{path}: a cue must end after it begins, but is {start:g} to {end:g} s: {text!a}."
    try:
        check_text(text, str(path))
    except ValueError as error:
        return str(error)
    return Part(start, end, text, channel)


def _lines_with_blanks(path: Path) -> Iterator[tuple[int, str]]:
    before = 0
    for number, line in numbered_lines(path, "surrogateescape"):
        if number > before + 1:
            yield number, ""
        yield number, line.strip()
        before = number


def _seconds(match: re.Match[str], group: int) -> float:
    hours, minutes, seconds, fraction = match.group(group, group + 1, group + 2, group + 3)
    return int(hours or 0) * 3600 + int(minutes) * 60 + int(seconds) + float(f"0.{fraction}")


def _ctm(path: Path, recording: str) -> Iterator[Part | str]:
    """Join the words of ``recording channel start duration word`` between pauses."""
    rows: list[tuple[int, list[str]]] = []
    for number, line in numbered_lines(path, "surrogateescape"):
        if not line.startswith(";;"):
            rows.append((number, line.split()))
    names = {fields[0] for _, fields in rows}
    channels: dict[str, list[tuple[float, float, str]]] = {}
    for number, fields in rows:
        try:
            begin, duration, word = float(fields[2]), float(fields[3]), fields[4]
            if not (0 <= begin < math.inf and 0 <= duration < math.inf):
                raise ValueError("out of range")
        except (IndexError, ValueError):
            yield f"{path}:{number}: must be `recording channel start duration word`."
            continue
        # A file of a single recording may give it any name.
        if len(names) > 1 and fields[0] != recording:
            yield f"{path}:{number}: is of recording {fields[0]!r}, not of {recording!r}."
            continue
        channels.setdefault(fields[1].upper(), []).append((begin, begin + duration, word))
    for label, words in channels.items():
        # Where there is only the first channel, it is that of programs that know no others.
        is_all = len(channels) == 1 and label in ("1", "A")
        channel = None if is_all else {"A": 0, "B": 1}.get(label)
        if channel is None and label.isdecimal() and not is_all:
            channel = max(int(label) - 1, 0)
        yield from _joined(sorted(words), path, channel)


def _joined(
    words: list[tuple[float, float, str]], path: Path, channel: int | None
) -> Iterator[Part | str]:
    part: list[tuple[float, float, str]] = []
    for word in words:
        if part and (word[0] - part[-1][1] > _PAUSE_S or word[1] - part[0][0] > _LONGEST_S):
            yield _part(part[0][0], part[-1][1], [text for _, _, text in part], path, channel)
            part = []
        part.append(word)
    if part:
        yield _part(part[0][0], part[-1][1], [text for _, _, text in part], path, channel)
