"""lhotse's recordings and supervisions in a folder, without cuts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from effasr.data.manifest import cuts
from effasr.data.manifest.lines import numbered_lines
from effasr.data.manifest.row import ManifestRow
from effasr.data.manifest.utterance import FolderFormat, ReadOptions, RejectedRow, Utterance

_KINDS = ("recordings", "supervisions")


def _files(folder: Path) -> list[Path]:
    """Return both files, such as recordings.jsonl.gz or corpus_recordings_train.jsonl.gz."""
    result = []
    for kind in _KINDS:
        matches = sorted(
            path
            for path in folder.glob(f"*{kind}*")
            if path.name.endswith((".jsonl", ".jsonl.gz")) and path.is_file()
        )
        if len(matches) != 1:
            return []
        result += matches
    return result


def _read(folder: Path, options: ReadOptions) -> Iterator[Utterance]:
    first, second = _files(folder)
    recordings: dict[str, dict[str, Any]] = {}
    for number, line in numbered_lines(first):
        row = ManifestRow.parse(line, first, number)
        recordings[row.string("id")] = dict(row.values)
    for number, line in numbered_lines(second):
        origin = f"{second}:{number}"
        try:
            row = ManifestRow.parse(line, second, number)
            yield cuts.parse(_cut(row, recordings), options)
        except ValueError as error:
            yield RejectedRow(f"{second.name}:{number}", origin, str(error))


FORMAT = FolderFormat(
    detect=lambda folder: folder.is_dir() and bool(_files(folder)),
    read=_read,
    files=lambda folder: (_files(folder), []),
)


def _cut(row: ManifestRow, recordings: dict[str, dict[str, Any]]) -> ManifestRow:
    """Return the line of a cut that is the span of a supervision."""
    supervision = dict(row.values)
    recording = recordings.get(row.string("recording_id"))
    if recording is None:
        raise row.error(
            f"recording {row.values['recording_id']!r} is not in the recordings.", "recording_id"
        )
    channel = supervision.get("channel", 0)
    values = {
        "id": supervision.get("id"),
        "type": "MultiCut" if isinstance(channel, list) else "MonoCut",
        "start": supervision.get("start", 0.0),
        "duration": supervision.get("duration"),
        "channel": channel,
        "supervisions": [supervision | {"start": 0.0}],
        "recording": recording,
    }
    return ManifestRow(values, row.path, row.line, row.origin, str(values))
