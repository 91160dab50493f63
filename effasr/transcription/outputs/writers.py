"""Writers of transcripts, to standard output or to one file per recording."""

import errno
import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal

from effasr.transcription.inputs.sources import Source, with_unique_names
from effasr.transcription.json_files import json_line, one_line, write_text
from effasr.transcription.outputs.cues import CueLayout, cues, segment_cues
from effasr.transcription.outputs.subtitles import GrowingFile, ctm, recording_name, srt, vtt
from effasr.transcription.results import INTERRUPTED, Failure, Result, Segment, Transcription
from effasr.transcription.transcribe import render, text_lines

Style = Literal["text", "json", "srt", "vtt", "ctm"]

_SUBTITLES: dict[str, Callable[[Transcription, CueLayout | None], str]] = {"srt": srt, "vtt": vtt}
_SUFFIXES = {"text": ".txt", "json": ".json", "srt": ".srt", "vtt": ".vtt", "ctm": ".ctm"}


class ResultWriter:
    def __init__(
        self,
        style: Style,
        folder: Path | None,
        sources: Sequence[Source],
        layout: CueLayout | None = None,  # of subtitles; JSON has cues if it is given
    ) -> None:
        if folder is None and style in _SUBTITLES and len(sources) > 1:
            raise ValueError(
                f"`--format {style}` takes one recording, but there are {len(sources)}: give "
                "`--output FOLDER` for a file of each."
            )
        if folder is not None:
            sources = with_unique_names(sources)
        self._style, self._layout = style, layout
        self._folder = folder
        self._names = {source.id: source.name for source in sources}
        # Recordings of CTM have no blanks, and are told apart by their names alone.
        self._recordings: dict[str, str] = {}
        others: set[str] = set()
        for source in sources:
            self._recordings[source.id] = name = _recording(source, others)
            others.add(name)

    def missing(self, sources: Iterable[Source]) -> list[Source]:
        # Of a name that is too long, `Path.is_file` raises an error.
        return [source for source in sources if not os.path.isfile(self._path(source.id))]

    def write(self, result: Result) -> Failure | None:
        """Write one result; failures are written only as JSON on standard output."""
        if isinstance(result, Failure):
            if self._style == "json" and self._folder is None:
                _write(render(result, "jsonl"))
            return None
        if self._folder is None:
            _write(self._rendered(result))
            return None
        is_text = self._style == "text"
        text = "\n".join([*text_lines(result), ""]) if is_text else self._rendered(result)
        path = self._path(result.id)
        if result.partial == INTERRUPTED:
            # `--continue` transcribes it again.
            path = path.with_name(f"{path.stem}.partial{path.suffix}")
        try:
            write_text(path, text)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            return Failure(result.id, f"{result.id}: too long a name for a file in --output.")
        return None

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._names[name]}{_SUFFIXES[self._style]}"

    def _rendered(self, result: Transcription) -> str:
        if self._style == "ctm":
            return ctm(result, self._recordings[result.id])
        if self._style in _SUBTITLES:
            return _SUBTITLES[self._style](result, self._layout)
        if self._style == "json" and self._layout is not None:
            rows = [cue.as_row() for cue in cues(result, self._layout)]
            return json_line(result.as_row() | {"cues": rows})
        return render(result, "jsonl" if self._style == "json" else "text")


class StreamWriter:
    """Writes segments of a stream to standard output: a valid file at any time."""

    def __init__(self, style: Style, name: str, layout: CueLayout | None = None) -> None:
        self._style, self._layout = style, layout
        self._file = None
        self._since = 0.0  # end of the last cue in JSON
        if style != "text" and style != "json":
            self._file = GrowingFile(style, name, layout)
            _write(self._file.header)

    def write(self, segment: Segment) -> None:
        if self._file is not None:
            _write(self._file.add(segment))
        elif self._style == "json" and self._layout is not None:
            result = segment_cues(segment, self._layout, self._since)
            self._since = result[-1].end if result else self._since
            _write(json_line(segment.as_row() | {"cues": [cue.as_row() for cue in result]}))
        elif self._style == "json":
            _write(json_line(segment.as_row()))
        else:
            _write(one_line(segment.text) + "\n")


def _recording(source: Source, others: Collection[str]) -> str:
    """Return a name in CTM, as no other recording has: without folders where possible."""
    plain, suffix = recording_name(os.path.basename(source.name)), os.path.splitext(source.audio)[1]
    candidates = plain, f"{plain}{suffix}", recording_name(source.id.replace("/", "_"))
    numbered = (f"{plain}_{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain(candidates, numbered) if name not in others)


def _write(text: str) -> None:
    # The encoding of a terminal may lack characters of the transcript.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()
