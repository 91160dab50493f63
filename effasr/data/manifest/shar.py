"""lhotse's Shar folders: shards of cuts, and of their audio in tar files.

lhotse reads shards from front to back; here every recording is found by its place in its tar file,
so that a plan may ask for any utterance at any time.
"""

import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

from effasr.data.audio.embedded import TarMember
from effasr.data.manifest import cuts
from effasr.data.manifest.lines import numbered_lines
from effasr.data.manifest.row import ManifestRow
from effasr.data.manifest.utterance import FolderFormat, ReadOptions, RejectedRow, Utterance
from effasr.untrusted.files import BoundedTar, open_regular

SHARDS_FOLDER = "shards"  # in what `effasr prepare` writes
_CUTS = re.compile(r"cuts\.(\d+)\.jsonl(\.gz)?")


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the shards of cuts, in the order of their numbers, and those of audio."""
    if (folder / SHARDS_FOLDER).is_dir():
        folder /= SHARDS_FOLDER
    shards = sorted(
        (match[1], path) for path in folder.iterdir() if (match := _CUTS.fullmatch(path.name))
    )
    tars = [(folder / f"recording.{number}.tar").absolute() for number, _ in shards]
    return [path for _, path in shards], tars


def _read(folder: Path, options: ReadOptions) -> Iterator[Utterance]:
    for path, tar in zip(*_files(folder), strict=True):
        members = _members(tar, path)
        for number, line in numbered_lines(path, "surrogateescape"):
            try:
                row = ManifestRow.parse(line, path, number)
                _locate_audio(row, tar, members)
                yield replace(cuts.parse(row, options), audio=str(tar))
            except ValueError as error:
                yield RejectedRow(f"{path.name}:{number}", f"{path}:{number}", str(error), str(tar))


FORMAT = FolderFormat(
    detect=lambda folder: folder.is_dir() and bool(_files(folder)[0]),
    read=_read,
    files=_files,
)


def _members(tar: Path, shard: Path) -> dict[str, TarMember]:
    """Locate the recording of each cut; only headers are read."""
    try:
        with (
            open_regular(tar) as opened,
            tarfile.open(fileobj=cast(BinaryIO, BoundedTar(opened)), mode="r:") as file,
        ):
            return {
                info.name.rpartition(".")[0]: TarMember(str(tar), info.offset_data, info.size)
                for info in file
                if info.isfile() and not info.name.endswith((".json", ".nodata", ".nometa"))
            }
    except (OSError, ValueError, tarfile.TarError) as error:
        raise ValueError(
            f"{tar}: the audio of {shard.name} cannot be read: {' '.join(str(error).split())}: "
            "write shards with the field `recording`, uncompressed."
        ) from error


def _locate_audio(row: ManifestRow, tar: Path, members: dict[str, TarMember]) -> None:
    """Replace the audio source of a line by its place in the tar file."""
    recording = row.values.get("recording")
    sources = recording.get("sources") if isinstance(recording, dict) else None
    if not (isinstance(sources, list) and sources and isinstance(sources[0], dict)):
        return
    if sources[0].get("type") == "shar":
        member = members.get(str(row.values.get("id")))
        if member is None:
            raise row.error(
                f"{tar.name} has no recording of cut {row.values.get('id')!r}: the shard is "
                "incomplete; write it again."
            )
        sources[0]["source"] = str(member)
