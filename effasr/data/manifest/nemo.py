"""NeMo's manifests: JSON lines with ``audio_filepath``, ``duration`` and ``text``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from effasr.data.manifest.row import ManifestRow
from effasr.data.manifest.utterance import FileUtterance, LineFormat, ReadOptions


def _detect(fields: Mapping[str, Any]) -> bool:
    return "audio_filepath" in fields


def parse(row: ManifestRow, options: ReadOptions) -> FileUtterance:
    audio = row.audio("audio_filepath")
    name = row.optional_string("id")
    return FileUtterance(
        id=name or Path(audio).stem,
        named=name is not None,
        origin=row.origin,
        audio=audio,
        text=row.transcript("text", untranscribed=options.untranscribed),
        prompt=row.prompt(options.language),
        offset=row.seconds("offset", zero=True),
        duration=row.seconds("duration"),
        speaker=row.optional_string("speaker"),
    )


FORMAT = LineFormat(_detect, parse)
