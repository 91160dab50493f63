"""Where transcripts go: all to standard output, or each to a file of its own."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from effasr.inference.files import write_text
from effasr.inference.results import Failure, Result, Transcription
from effasr.inference.subtitles import ctm, srt, vtt
from effasr.inference.transcribe import render

Style = Literal["text", "json", "srt", "vtt", "ctm"]

_TIMED: dict[str, Callable[[Transcription], str]] = {"srt": srt, "vtt": vtt, "ctm": ctm}
_SUFFIXES = {"text": ".txt", "json": ".json", "srt": ".srt", "vtt": ".vtt", "ctm": ".ctm"}
_OF_ONE = ("srt", "vtt")
"""Formats of a file for one recording alone."""


class Sink:
    """Writes results as they come.

    Args:
        style: The format.
        folder: For a file of each recording, named after it; standard output by default.
        sources: The recordings.

    Raises:
        ValueError: Several recordings would be mixed in one stream of subtitles, or two would be
            written to the same file.
    """

    def __init__(self, style: Style, folder: Path | None, sources: Sequence[str]) -> None:
        if folder is None and style in _OF_ONE and len(sources) > 1:
            raise ValueError(
                f"`--format {style}` takes one recording, but there are {len(sources)}: give "
                "`--output FOLDER` for a file of each."
            )
        if folder is not None:
            name, count = Counter(Path(source).stem for source in sources).most_common(1)[0]
            if count > 1:
                raise ValueError(
                    f"`--output` must have a file of its own for each recording, but {count} are "
                    f"called {name!r}: transcribe them by separate commands."
                )
        self._style = style
        self._folder = folder

    def write(self, result: Result) -> None:
        """Write one result; a failure has a place in JSON alone."""
        if isinstance(result, Failure):
            if self._style == "json" and self._folder is None:
                _say(render(result, "jsonl"))
            return
        if self._folder is None:
            _say(self._rendered(result))
            return
        text = result.text + "\n" if self._style == "text" else self._rendered(result)
        write_text(self._folder / f"{Path(result.id).stem}{_SUFFIXES[self._style]}", text)

    def _rendered(self, result: Transcription) -> str:
        if self._style in _TIMED:
            return _TIMED[self._style](result)
        return render(result, "jsonl" if self._style == "json" else "text")


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
