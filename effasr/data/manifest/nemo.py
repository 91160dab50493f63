"""Reads NeMo's manifests: JSON lines with ``audio_filepath``, ``duration`` and ``text``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from effasr.data.manifest.fields import (
    optional_text,
    prompt_fields,
    seconds_field,
    text_field,
    transcript_field,
)
from effasr.data.manifest.lines import parse_object
from effasr.data.manifest.utterance import FileUtterance, absolute


def utterances(
    lines: Iterable[tuple[int, str]], path: Path, language: str, *, untranscribed: bool = False
) -> Iterator[FileUtterance]:
    """Read the numbered lines of a NeMo manifest; relative audio paths are relative to its folder.

    With ``untranscribed`` a line may lack a text.

    Raises:
        ValueError: A line is malformed; the message names file, line, field and remedy.
    """
    for number, line in lines:
        origin = f"{path}:{number}"
        row = parse_object(line, origin)
        audio = text_field(row, "audio_filepath", origin)
        name = optional_text(row, "id", origin)
        yield FileUtterance(
            id=name or Path(audio).stem,
            named=name is not None,
            origin=origin,
            audio=absolute(audio, path.parent),
            text=transcript_field(row, "text", origin, untranscribed=untranscribed),
            prompt=prompt_fields(row, origin, language),
            offset=seconds_field(row, "offset", origin, zero=True),
            duration=seconds_field(row, "duration", origin),
            speaker=optional_text(row, "speaker", origin),
        )
