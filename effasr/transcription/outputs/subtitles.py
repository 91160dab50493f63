"""Subtitles (SRT, WebVTT) and CTM files of transcripts with times."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from effasr.transcription.results import Segment, Transcription
from effasr.transcription.word_timestamps import Word
from effasr.untrusted.display import BIDI_MARKS

_LONGEST_S = 6.0
_MOST_CHARACTERS = 84  # two lines of 42, as television allows
_PAUSE_S = 1.0

_VTT_HEADER = "WEBVTT\n"

_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_BIDI_MARKS = re.compile(f"[{BIDI_MARKS}]")

Cue = tuple[float, float, str]  # start, end, text


def cues(transcription: Transcription) -> list[Cue]:
    """Return the cues of a transcript: words up to a pause, or segments without words."""
    return [cue for segment in transcription.segments for cue in _cues(segment)]


def srt(transcription: Transcription) -> str:
    return "\n".join(_srt(number, cue) for number, cue in enumerate(cues(transcription), 1))


def vtt(transcription: Transcription) -> str:
    return "\n".join([_VTT_HEADER, *map(_vtt, cues(transcription))])


def ctm(transcription: Transcription, recording: str = "") -> str:
    """NIST's CTM; segments where words have no time. Spaces in fields become underscores."""
    name = recording_name(recording or Path(transcription.id).stem)
    return "".join(_ctm(name, segment) for segment in transcription.segments)


class GrowingFile:
    """A recording segment by segment: a blank line after each cue makes it valid at any time."""

    def __init__(self, style: Literal["srt", "vtt", "ctm"], name: str) -> None:
        self.header = _VTT_HEADER + "\n" if style == "vtt" else ""
        self._style = style
        self._name = recording_name(name)
        self._numbers = itertools.count(1)

    def add(self, segment: Segment) -> str:
        if self._style == "ctm":
            return _ctm(self._name, segment)
        if self._style == "vtt":
            return "".join(f"{_vtt(cue)}\n" for cue in _cues(segment))
        return "".join(f"{_srt(next(self._numbers), cue)}\n" for cue in _cues(segment))


def _cues(segment: Segment) -> Iterator[Cue]:
    if segment.words:
        for group in _groups(list(_spaced(segment.words, segment.text))):
            if text := _plain("".join(word.text for word in group)):
                yield group[0].start, group[-1].end, text
    elif text := _plain(segment.text):
        yield segment.start, segment.end, text


def _spaced(words: Iterable[Word], text: str) -> Iterator[Word]:
    """Yield the words with a space before them, unless they follow each other in the text."""
    # The language alone does not decide: one without spaces has some around foreign words.
    end = 0
    for word in words:
        start = text.find(word.text, end)
        yield word if start == end else replace(word, text=f" {word.text}")
        if start >= 0:
            end = start + len(word.text)


def _plain(text: str) -> str:
    """Return a text without what would end its cue: control characters, line breaks and arrows."""
    return " ".join(_visible(text).replace("-->", "->").split())


def recording_name(name: str) -> str:
    """Return a name as the first field of a CTM line, which is a comment if it begins with `;;`."""
    return _field(name).lstrip(";") or "recording"


def _field(text: str) -> str:
    return "_".join(_visible(text).split())


def _visible(text: str) -> str:
    """Return a text without controls and directional marks, which reorder a terminal's line."""
    return _CONTROLS.sub(" ", _BIDI_MARKS.sub("", text))


def _srt(number: int, cue: Cue) -> str:
    start, end, text = cue
    return f"{number}\n{_times(start, end, ',')}\n{text}\n"


def _vtt(cue: Cue) -> str:
    start, end, text = cue
    return f"{_times(start, end, '.')}\n{_escaped(text)}\n"


def _ctm(name: str, segment: Segment) -> str:
    return "".join(
        f"{name} 1 {start:.3f} {end - start:.3f} {word}\n"
        for start, end, text in _timed(segment)
        if (word := _field(text))
    )


def _timed(segment: Segment) -> Iterator[Cue]:
    if segment.words:
        yield from ((word.start, word.end, word.text) for word in segment.words)
        return
    # The words of a segment share its time equally.
    texts = segment.text.split()
    each = (segment.end - segment.start) / max(1, len(texts))
    for index, text in enumerate(texts):
        start = segment.start + index * each
        yield start, start + each, text


def _groups(words: Sequence[Word]) -> Iterable[list[Word]]:
    group: list[Word] = []
    for word in words:
        length = len("".join(other.text for other in (*group, word)).lstrip())
        if group and (
            word.start - group[-1].end > _PAUSE_S
            or word.end - group[0].start > _LONGEST_S
            or length > _MOST_CHARACTERS
        ):
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def _times(start: float, end: float, point: str) -> str:
    """Return the line of a cue's times; a cue lasts a millisecond at least, or players drop it."""
    first = max(0, round(1000 * start))
    last = max(first + 1, round(1000 * end))
    return f"{_clock(first, point)} --> {_clock(last, point)}"


def _clock(milliseconds: int, point: str) -> str:
    hours, remainder = divmod(milliseconds, 3_600_000)
    minutes, remainder = divmod(remainder, 60_000)
    return f"{hours:02}:{minutes:02}:{remainder // 1000:02}{point}{remainder % 1000:03}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
