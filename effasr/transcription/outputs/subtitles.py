"""Subtitles (SRT, WebVTT) and CTM files of transcripts with times."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from effasr.transcription.results import Segment, Transcription
from effasr.transcription.word_timestamps import Word

_LONGEST_S = 6.0
_MOST_CHARACTERS = 84
"""Two lines of 42, as television allows."""
_PAUSE_S = 1.0

_VTT_HEADER = "WEBVTT\n"

Cue = tuple[float, float, str]
"""Start, end, text."""


def cues(transcription: Transcription) -> list[Cue]:
    """Return the cues of a transcript: words up to a pause, or segments without words."""
    return [cue for segment in transcription.segments for cue in _cues(segment)]


def srt(transcription: Transcription) -> str:
    """SubRip, with every cue numbered from 1."""
    return "\n".join(_srt(number, cue) for number, cue in enumerate(cues(transcription), 1))


def vtt(transcription: Transcription) -> str:
    """WebVTT."""
    return "\n".join([_VTT_HEADER, *map(_vtt, cues(transcription))])


def ctm(transcription: Transcription) -> str:
    """NIST's CTM: recording, channel, start, duration and word; segments where words have no time.

    Spaces in the name of the recording become underscores, as fields are what spaces separate.
    """
    name = "_".join(Path(transcription.id).stem.split()) or "recording"
    return "".join(_ctm(name, segment) for segment in transcription.segments)


class GrowingFile:
    """A recording in one of these formats, segment by segment: a valid file at any time.

    A blank line follows each cue at once, so that readers know that it is complete.

    Args:
        style: srt, vtt or ctm.
        name: Name of the recording in CTM; without spaces.

    Attributes:
        header: Beginning of the file.
    """

    def __init__(self, style: Literal["srt", "vtt", "ctm"], name: str) -> None:
        self.header = _VTT_HEADER + "\n" if style == "vtt" else ""
        self._style = style
        self._name = name
        self._numbers = itertools.count(1)

    def add(self, segment: Segment) -> str:
        """Return the text of the next segment."""
        if self._style == "ctm":
            return _ctm(self._name, segment)
        if self._style == "vtt":
            return "".join(f"{_vtt(cue)}\n" for cue in _cues(segment))
        return "".join(f"{_srt(next(self._numbers), cue)}\n" for cue in _cues(segment))


def _cues(segment: Segment) -> Iterator[Cue]:
    if segment.words:
        for group in _groups(segment.words):
            yield group[0].start, group[-1].end, " ".join(word.text for word in group)
    # A blank line in a text would end the cue.
    elif text := " ".join(segment.text.split()):
        yield segment.start, segment.end, text


def _srt(number: int, cue: Cue) -> str:
    start, end, text = cue
    return f"{number}\n{_clock(start, ',')} --> {_clock(end, ',')}\n{text}\n"


def _vtt(cue: Cue) -> str:
    start, end, text = cue
    return f"{_clock(start, '.')} --> {_clock(end, '.')}\n{_escaped(text)}\n"


def _ctm(name: str, segment: Segment) -> str:
    return "".join(
        f"{name} 1 {start:.3f} {end - start:.3f} {word}\n" for start, end, word in _timed(segment)
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
        length = sum(len(one.text) + 1 for one in group) + len(word.text)
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


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(1000 * seconds)
    hours, rest = divmod(milliseconds, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
