"""Subtitles (SRT, WebVTT) and CTM files of transcripts with times."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from effasr.transcription.outputs.cues import Cue, CueLayout, cues, segment_cues, visible
from effasr.transcription.results import Segment, Transcription

_VTT_HEADER = "WEBVTT\n"
_NOTE_S = 2.0  # how long a note is shown


def srt(transcription: Transcription, layout: CueLayout | None = None) -> str:
    all_cues = cues(transcription, layout)
    if transcription.partial is not None:
        # SRT has no comments.
        end = max([transcription.duration, *(cue.end for cue in all_cues)])
        line = visible(f"[partial: {transcription.partial}]").replace("-->", "->")
        all_cues.append(Cue(end, end + _NOTE_S, (line,)))
    return "\n".join(_srt(number, cue) for number, cue in enumerate(all_cues, 1))


def vtt(transcription: Transcription, layout: CueLayout | None = None) -> str:
    note = []
    if transcription.partial is not None:
        note.append(f"NOTE partial: {visible(transcription.partial)}\n".replace("-->", "->"))
    return "\n".join([_VTT_HEADER, *note, *map(_vtt, cues(transcription, layout))])


def ctm(transcription: Transcription, recording: str = "") -> str:
    """NIST's CTM; segments where words have no time. Spaces in fields become underscores."""
    name = recording_name(recording or Path(transcription.id).stem)
    partial = transcription.partial
    note = "" if partial is None else f";; {name} partial: {visible(partial)}\n"
    # Lines are ordered by recording, channel and time.
    segments = sorted(transcription.segments, key=lambda segment: segment.channel or 0)
    return note + "".join(_ctm(name, segment) for segment in segments)


class GrowingFile:
    """A recording segment by segment: a blank line after each cue makes it valid at any time."""

    def __init__(
        self, style: Literal["srt", "vtt", "ctm"], name: str, layout: CueLayout | None = None
    ) -> None:
        self.header = _VTT_HEADER + "\n" if style == "vtt" else ""
        self._style, self._layout = style, layout
        self._name = recording_name(name)
        self._numbers = itertools.count(1)
        self._since = 0.0  # end of the last cue

    def add(self, segment: Segment) -> str:
        if self._style == "ctm":
            return _ctm(self._name, segment)
        result = segment_cues(segment, self._layout, self._since)
        self._since = result[-1].end if result else self._since
        if self._style == "vtt":
            return "".join(f"{_vtt(cue)}\n" for cue in result)
        return "".join(f"{_srt(next(self._numbers), cue)}\n" for cue in result)


def recording_name(name: str) -> str:
    """Return a name as the first field of a CTM line, which is a comment if it begins with `;;`."""
    return _field(name).lstrip(";") or "recording"


def _field(text: str) -> str:
    return "_".join(visible(text).split())


def _srt(number: int, cue: Cue) -> str:
    speaker = "" if cue.channel is None else f"Channel {cue.channel}: "
    return "\n".join((str(number), _times(cue, ","), speaker + cue.lines[0], *cue.lines[1:], ""))


def _vtt(cue: Cue) -> str:
    voice = "" if cue.channel is None else f"<v Channel {cue.channel}>"
    first, *more = map(_escaped, cue.lines)
    return "\n".join((_times(cue, "."), voice + first, *more, ""))


def _ctm(name: str, segment: Segment) -> str:
    channel = 1 + (segment.channel or 0)  # NIST counts from 1
    return "".join(
        f"{name} {channel} {start:.3f} {end - start:.3f} {word}\n"
        for start, end, text in _timed(segment)
        if (word := _field(text))
    )


def _timed(segment: Segment) -> Iterator[tuple[float, float, str]]:
    if segment.words:
        yield from ((word.start, word.end, word.text) for word in segment.words)
        return
    # The words of a segment share its time equally.
    texts = segment.text.split()
    each = (segment.end - segment.start) / max(1, len(texts))
    for index, text in enumerate(texts):
        start = segment.start + index * each
        yield start, start + each, text


def _times(cue: Cue, point: str) -> str:
    first, last = (_clock(round(1000 * seconds), point) for seconds in (cue.start, cue.end))
    return f"{first} --> {last}"


def _clock(milliseconds: int, point: str) -> str:
    hours, remainder = divmod(milliseconds, 3_600_000)
    minutes, remainder = divmod(remainder, 60_000)
    return f"{hours:02}:{minutes:02}:{remainder // 1000:02}{point}{remainder % 1000:03}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
