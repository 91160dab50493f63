"""NeMo's manifests: JSON lines with ``audio_filepath``, ``duration`` and ``text``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from effasr.data.manifest.row import AUDIO, IDS, READ, SPEAKER, TEXT, ManifestRow
from effasr.data.manifest.utterance import FileUtterance, LineFormat, ReadOptions


def _detect(fields: Mapping[str, Any]) -> bool:
    return "audio_filepath" in fields or (
        not fields.keys().isdisjoint(AUDIO) and not fields.keys().isdisjoint((*TEXT, "duration"))
    )


def parse(row: ManifestRow, options: ReadOptions) -> FileUtterance:
    audio = row.audio(row.first(AUDIO))
    name = row.name(IDS)
    offset, duration = row.span()
    return FileUtterance(
        id=name or Path(audio).stem,
        named=name is not None,
        origin=row.origin,
        audio=audio,
        text=row.transcript(row.first(TEXT), untranscribed=options.untranscribed),
        prompt=row.prompt(options.default),
        stated=frozenset(row.stated()),
        offset=offset,
        duration=duration,
        channel=row.channel(),
        speaker=row.name(SPEAKER),
    )


def _parse_line(row: ManifestRow, options: ReadOptions) -> FileUtterance:
    if options.unread is not None:
        options.unread.update(row.values.keys() - READ)
    return parse(row, options)


FORMAT = LineFormat(_detect, _parse_line)
