"""lhotse's recordings and supervisions in a folder, without cuts."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

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
    recordings: dict[str, ManifestRow] = {}
    for number, line in numbered_lines(first, "surrogateescape"):
        origin = f"{first}:{number}"
        try:
            row = ManifestRow.parse(line, first, number)
            if recordings.setdefault(row.string("id"), row) is not row:
                raise row.error(f"recording {row.values['id']!r} comes twice: the first is read.")
        except ValueError as error:
            yield RejectedRow(f"{first.name}:{number}", origin, str(error))
    used = set()
    for number, line in numbered_lines(second, "surrogateescape"):
        origin = f"{second}:{number}"
        try:
            row = ManifestRow.parse(line, second, number)
            used.add(row.values.get("recording_id"))
            yield cuts.parse(_cut(row, recordings), options)
        except ValueError as error:
            yield RejectedRow(f"{second.name}:{number}", origin, str(error))
    for name, row in recordings.items():
        if name not in used:
            problem = f"{row.origin}: recording {name!r} has no supervision."
            yield RejectedRow(name, row.origin, problem)


FORMAT = FolderFormat(
    detect=lambda folder: folder.is_dir() and bool(_files(folder)),
    read=_read,
    files=lambda folder: (_files(folder), []),
)


def _cut(row: ManifestRow, recordings: dict[str, ManifestRow]) -> ManifestRow:
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
        # lhotse takes fields out of what it reads.
        "recording": deepcopy(recording.values),
    }
    return ManifestRow(values, row.path, row.line, row.origin, str(values))
