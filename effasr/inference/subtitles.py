"""Transcripts with times in the formats that players and scoring tools read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from effasr.inference.results import Transcription
from effasr.inference.words import Word

_LONGEST_S = 6.0
_MOST_CHARACTERS = 84
"""Two lines of 42: what television allows on screen."""
_PAUSE_S = 1.0

Cue = tuple[float, float, str]
"""Start, end, text."""


def cues(transcription: Transcription) -> list[Cue]:
    """What stands on the screen at a time: words up to a pause, or segments without words."""
    shown: list[Cue] = []
    for segment in transcription.segments:
        if segment.words:
            shown += [
                (group[0].start, group[-1].end, " ".join(word.text for word in group))
                for group in _groups(segment.words)
            ]
        elif segment.text:
            shown.append((segment.start, segment.end, segment.text))
    return shown


def srt(transcription: Transcription) -> str:
    """SubRip, with every cue numbered from 1."""
    blocks = [
        f"{number}\n{_clock(start, ',')} --> {_clock(end, ',')}\n{text}\n"
        for number, (start, end, text) in enumerate(cues(transcription), 1)
    ]
    return "\n".join(blocks)


def vtt(transcription: Transcription) -> str:
    """WebVTT."""
    blocks = [
        f"{_clock(start, '.')} --> {_clock(end, '.')}\n{_escaped(text)}\n"
        for start, end, text in cues(transcription)
    ]
    return "\n".join(["WEBVTT\n", *blocks])


def ctm(transcription: Transcription) -> str:
    """NIST's CTM: recording, channel, start, duration and word; segments where words have no time.

    Spaces in the name of the recording become underscores, as fields are what spaces separate.
    """
    name = "_".join(Path(transcription.id).stem.split()) or "recording"
    return "".join(
        f"{name} 1 {start:.3f} {end - start:.3f} {word}\n"
        for start, end, text in _timed(transcription)
        for word in [text]
    )


def _timed(transcription: Transcription) -> Iterator[Cue]:
    for segment in transcription.segments:
        if segment.words:
            yield from ((word.start, word.end, word.text) for word in segment.words)
            continue
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
