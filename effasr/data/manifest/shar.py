"""Reads lhotse's Shar folders: shards of cuts, and of their audio in tar files.

lhotse reads shards from front to back; here every recording is found by its place in its tar
file, so that a plan may ask for any utterance at any time.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

from effasr.data.audio.waveform import TarMember
from effasr.data.manifest.cuts import utterances as cut_utterances
from effasr.data.manifest.lines import numbered_lines, parse_object
from effasr.data.manifest.utterance import CutUtterance
from effasr.untrusted.archives import BoundedTar
from effasr.untrusted.files import open_regular

_CUTS = re.compile(r"cuts\.(\d+)\.jsonl(\.gz)?")


def is_shar(folder: Path) -> bool:
    """Return whether the folder holds shards of cuts."""
    return any(_CUTS.fullmatch(path.name) for path in folder.glob("cuts.*"))


def files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the shards of cuts, in the order of their numbers, and those of audio."""
    shards = sorted(
        (match[1], path) for path in folder.iterdir() if (match := _CUTS.fullmatch(path.name))
    )
    tars = [(folder / f"recording.{number}.tar").absolute() for number, _ in shards]
    return [path for _, path in shards], tars


def utterances(
    folder: Path, language: str, *, untranscribed: bool = False
) -> Iterator[CutUtterance]:
    """Read the shards in the order of their numbers.

    Raises:
        ValueError: A shard of audio is missing or damaged or lacks a recording, or a line is
            malformed.
    """
    for path, tar in zip(*files(folder), strict=True):
        located = _located(path, tar, _members(tar, path))
        for utterance in cut_utterances(located, path, language, untranscribed=untranscribed):
            yield replace(utterance, audio=str(tar))


def _members(tar: Path, cuts: Path) -> dict[str, TarMember]:
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
            f"{tar}: the audio of {cuts.name} cannot be read: {' '.join(str(error).split())}: "
            "write shards with the field `recording`, uncompressed."
        ) from error


def _located(cuts: Path, tar: Path, members: dict[str, TarMember]) -> Iterator[tuple[int, str]]:
    """Yield the lines of a shard, each with the place of its audio."""
    for number, line in numbered_lines(cuts):
        row = parse_object(line, f"{cuts}:{number}")
        recording = row.get("recording")
        sources = recording.get("sources") if isinstance(recording, dict) else None
        if (
            isinstance(sources, list)
            and sources
            and isinstance(sources[0], dict)
            and sources[0].get("type") == "shar"
        ):
            member = members.get(str(row.get("id")))
            if member is None:
                raise ValueError(
                    f"{cuts}:{number}: {tar.name} has no recording of cut {row.get('id')!r}: "
                    "the shard is incomplete; write it again."
                )
            sources[0]["source"] = str(member)
            line = json.dumps(row, ensure_ascii=False)
        yield number, line
