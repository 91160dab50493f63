"""Cues of subtitles: where a transcript is divided into cues, and cues into lines."""

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from effasr.checks import check
from effasr.data.scripts import UNSPACED_CHARACTER, split_words
from effasr.transcription.results import Segment, Transcription
from effasr.transcription.word_timestamps import Word, divided, in_order
from effasr.untrusted.display import BIDI_MARKS

_PAUSE_S = 1.0  # no cue goes on over a longer pause
_SHORT_PAUSE_S = 0.3  # a pause at which a cue may end as well as after a sentence
_NARROWEST = 10  # columns, which are more than any character has

# Cost of the end of a cue, where a further cue costs 1.
_CLAUSE_COST, _WORD_COST = 0.5, 1.5
_FILL_COST = 0.5  # of a full cue; the square of the fill favours cues of equal lengths

_SENTENCE_END = re.compile(r"[.?!\u2026\u3002\uff01\uff1f\u061f\u06d4\u0964\u104b\u17d4]\W*$")
_CLAUSE_END = re.compile(r"[,;:\u2013\u2014\u3001\uff0c\uff1b\uff1a\u060c\u061b]\W*$")
_SMALL_KANA = frozenset("ぁぃぅぇぉっゃゅょゎァィゥェォッャュョヮヵヶー々")  # they begin no line

_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_BIDI_MARKS = re.compile(f"[{BIDI_MARKS}]")


@dataclass(frozen=True, slots=True)
class CueLayout:
    """Largest size of a cue, by default that of television."""

    line_width: int = 42  # columns of a line; full-width characters take two
    lines: int = 2
    cue_seconds: float = 7.0

    def __post_init__(self) -> None:
        width, lines, longest = self.line_width, self.lines, self.cue_seconds
        check(width >= _NARROWEST, "line_width", f"be at least {_NARROWEST}", width)
        check(lines >= 1, "lines", "be at least 1", lines)
        check(1.0 <= longest < math.inf, "cue_seconds", "be at least 1", longest)


@dataclass(frozen=True, slots=True)
class Cue:
    start: float  # seconds from the beginning of the recording, whole milliseconds
    end: float
    lines: tuple[str, ...]
    estimated: bool = False  # whether the time of the segment was divided by the length of the text
    channel: int | None = None  # of a recording whose channels were transcribed each on its own

    def as_row(self) -> dict[str, Any]:
        row = {"start": self.start, "end": self.end, "lines": list(self.lines)}
        row |= {"estimated": True} if self.estimated else {}
        return row if self.channel is None else row | {"channel": self.channel}


@dataclass(frozen=True, slots=True)
class _Unit:
    """Text without a place for a line break, with its time."""

    text: str
    spaced: bool  # whether a space precedes it in a line
    start: float
    end: float

    @property
    def width(self) -> int:
        return text_width(self.text)


def cues(transcription: Transcription, layout: CueLayout | None = None) -> list[Cue]:
    result: list[Cue] = []
    if transcription.channels:
        # Cues of two speakers may overlap.
        for channel in transcription.channels:
            part = replace(transcription.of_channel(channel), channels=())
            result += [replace(cue, channel=channel) for cue in cues(part, layout)]
        return sorted(result, key=lambda cue: cue.start)
    for segment in transcription.segments:
        result += segment_cues(segment, layout, result[-1].end if result else 0.0)
    return result


def segment_cues(
    segment: Segment, layout: CueLayout | None = None, since: float = 0.0
) -> list[Cue]:
    """Return the cues of a segment, the first not before ``since``, without overlap.

    Each has a millisecond at least, or players drop it.
    """
    layout = CueLayout() if layout is None else layout
    units = list(_units(segment, layout.line_width))
    groups = [(group, _lines(group, layout)) for group in _groups(units, layout)]
    groups = [(group, lines) for group, lines in groups if lines]
    begin, longest = round(1000 * max(0.0, since)), int(1000 * layout.cue_seconds)
    times = []
    for group, _ in groups:
        first = max(begin, round(1000 * group[0].start))
        times.append((first, min(round(1000 * group[-1].end), first + longest)))
    last = max([segment.end, *(unit.end for unit in units)])
    # The last millisecond may not be a whole one: a cue does not go on after the audio.
    limit = max(begin + len(groups), int(1000 * last + 1e-6))
    return [
        Cue(first / 1000, end / 1000, lines, estimated=not segment.words)
        for (first, end), (_, lines) in zip(in_order(times, begin, limit, 1), groups, strict=True)
    ]


def visible(text: str) -> str:
    """Return a text without controls and directional marks, which reorder a terminal's line."""
    return _CONTROLS.sub(" ", _BIDI_MARKS.sub("", text))


def text_width(text: str) -> int:
    """Return the columns of a text in a font of fixed width."""
    return sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def graphemes(text: str) -> list[str]:
    """Divide a text into characters with the marks, joiners and modifiers that follow them."""
    parts: list[str] = []
    for character in text:
        if parts and _extends(parts[-1], character):
            parts[-1] += character
        else:
            parts.append(character)
    return parts


def _extends(before: str, character: str) -> bool:
    joined = before.endswith("\u200d") or "\U0001f3fb" <= character <= "\U0001f3ff"
    # Two regional indicators are a flag.
    flag = len(before) == 1 and all("\U0001f1e6" <= c <= "\U0001f1ff" for c in before + character)
    return joined or flag or unicodedata.category(character) in ("Mn", "Mc", "Me", "Cf")


def _units(segment: Segment, width: int) -> Iterator[_Unit]:
    """Yield the parts of a segment between which lines and cues may be divided."""
    words = segment.words or (Word(segment.text, segment.start, segment.end),)
    pieces = [piece for word in _spaced(words, segment.text) for piece in _pieces(word)]
    joined: list[_Unit] = []
    for piece in pieces:
        if joined and not piece.spaced and not _may_break(joined[-1].text, piece.text):
            before = joined[-1]
            joined[-1] = replace(before, text=before.text + piece.text, end=piece.end)
        else:
            joined.append(piece)
    for unit in joined:
        yield from _fitting(unit, width)


def _spaced(words: Iterable[Word], text: str) -> Iterator[Word]:
    """Yield the words with a space before them, unless they follow each other in the text."""
    # The language alone does not decide: a script without spaces has some around foreign words.
    end = 0
    for word in words:
        start = text.find(word.text, end)
        yield word if start == end else replace(word, text=f" {word.text}")
        if start >= 0:
            end = start + len(word.text)


def _pieces(word: Word) -> list[_Unit]:
    text = visible(word.text)
    parts, spaced = [], []
    for number, part in enumerate(text.split()):
        letters = split_words(part)
        parts += letters
        spaced += [number > 0 or text[0].isspace(), *[False] * (len(letters) - 1)]
    return _divided(parts, spaced, word.start, word.end)


def _fitting(unit: _Unit, width: int) -> list[_Unit]:
    """Divide a unit that is longer than a line."""
    if unit.width <= width:
        return [unit]
    parts = [""]
    for grapheme in graphemes(unit.text):
        if parts[-1] and text_width(parts[-1] + grapheme) > width:
            parts.append("")
        parts[-1] += grapheme
    return _divided(parts, [unit.spaced, *[False] * (len(parts) - 1)], unit.start, unit.end)


def _divided(parts: Sequence[str], spaced: Sequence[bool], start: float, end: float) -> list[_Unit]:
    words = divided(parts, start, end)
    return [
        _Unit(word.text, space, word.start, word.end)
        for word, space in zip(words, spaced, strict=True)
    ]


def _may_break(before: str, after: str) -> bool:
    """Whether a line may end between two parts of a text without a space between them."""
    last, first = before[-1], after[0]
    if not (UNSPACED_CHARACTER.match(last) or UNSPACED_CHARACTER.match(first)):
        return False
    opens = unicodedata.category(last) in ("Ps", "Pi")
    closes = unicodedata.category(first) in ("Pe", "Pf", "Po", "Pd", "Mn", "Mc", "Cf")
    return not (opens or closes or first in _SMALL_KANA)


def _groups(units: Sequence[_Unit], layout: CueLayout) -> list[Sequence[_Unit]]:
    """Divide units into cues with the least cost, which counts cues, bad ends and uneven fills."""
    widths = [unit.width for unit in units]
    capacity = layout.line_width * layout.lines
    best, origin = [0.0, *[math.inf] * len(units)], [0] * (len(units) + 1)
    for begin, first in enumerate(units):
        lines, used, total = 1, 0, 0
        for at in range(begin, len(units)):
            unit, room = units[at], widths[at] + (at > begin and units[at].spaced)
            pause = at > begin and unit.start - units[at - 1].end > _PAUSE_S
            if pause or (at > begin and unit.end - first.start > layout.cue_seconds):
                break
            used += room
            if at > begin and used > layout.line_width:
                lines, used = lines + 1, widths[at]
            if lines > layout.lines:
                break
            total += room
            cost = best[begin] + 1 + _end_cost(units, at) + _FILL_COST * (total / capacity) ** 2
            if cost < best[at + 1]:
                best[at + 1], origin[at + 1] = cost, begin
    groups, end = [], len(units)
    while end:
        groups.append(units[origin[end] : end])
        end = origin[end]
    return groups[::-1]


def _end_cost(units: Sequence[_Unit], at: int) -> float:
    """Cost of a cue that ends with unit ``at``."""
    text = units[at].text
    is_last = at + 1 == len(units) or units[at + 1].start - units[at].end >= _SHORT_PAUSE_S
    if is_last or _SENTENCE_END.search(text):
        return 0.0
    return _CLAUSE_COST if _CLAUSE_END.search(text) else _WORD_COST


def _lines(units: Sequence[_Unit], layout: CueLayout) -> tuple[str, ...]:
    """Return the fewest lines, of widths as equal as possible."""
    fewest = len(_wrapped(units, layout.line_width))
    total = sum(unit.width for unit in units)
    narrowest = max(total // fewest, *(unit.width for unit in units))
    widths = range(narrowest, layout.line_width)
    wrapped = (_wrapped(units, width) for width in widths)
    lines = next((lines for lines in wrapped if len(lines) == fewest), None)
    lines = _wrapped(units, layout.line_width) if lines is None else lines
    return tuple(line for line in map(_plain, lines) if line)


def _wrapped(units: Sequence[_Unit], width: int) -> list[str]:
    lines: list[str] = []
    for unit in units:
        longer = f"{lines[-1] if lines else ''}{' ' * unit.spaced}{unit.text}"
        if lines and text_width(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(unit.text)
    return lines


def _plain(line: str) -> str:
    """Return a line without what would end its cue: control characters and arrows."""
    return " ".join(visible(line).replace("-->", "->").split())
