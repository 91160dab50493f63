"""Kaldi data folders: ``wav.scp``, ``text``, and optional files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from effasr.data.manifest.lines import numbered_lines
from effasr.data.manifest.row import absolute
from effasr.data.manifest.utterance import (
    FileUtterance,
    FolderFormat,
    ReadOptions,
    RejectedRow,
    Utterance,
)
from effasr.data.prompt import Prompt

_FILES = ("wav.scp", "text", "segments", "utt2spk", "utt2lang", "reco2file_and_channel")


def _read(folder: Path, options: ReadOptions) -> Iterator[Utterance]:
    """Read a Kaldi data folder, in the order of ``text``.

    Where ``text`` lacks utterances, the order is that of ``segments``, or of ``wav.scp``.
    """
    recordings = _recordings(folder)
    segments = _segments(folder, recordings)
    speakers = _table(folder, "utt2spk", optional=True)
    languages = _table(folder, "utt2lang", optional=True)
    texts = _table(folder, "text", optional=options.untranscribed)
    if options.untranscribed:
        names = recordings if segments is None else segments
        texts = {name: (str(folder), "") for name in names} | texts
    channels = _channels(folder)
    for name, (origin, text) in texts.items():
        try:
            result = _find(folder, origin, name, recordings, segments)
        except ValueError as error:
            yield RejectedRow(name, origin, str(error), named=True)
            continue
        recording, offset, duration = result
        spoken = languages[name][1].strip() if name in languages else options.language
        yield FileUtterance(
            id=name,
            named=True,
            origin=origin,
            audio=recordings[recording],
            text=text.strip(),
            prompt=Prompt(spoken, spoken),
            offset=offset,
            duration=duration,
            channel=channels.get(recording),
            speaker=speakers[name][1].strip() if name in speakers else None,
        )


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    return [file for name in _FILES if (file := folder / name).is_file()], []


FORMAT = FolderFormat(
    detect=lambda folder: (folder / "wav.scp").is_file(), read=_read, files=_files
)


def _table(folder: Path, name: str, *, optional: bool = False) -> dict[str, tuple[str, str]]:
    """Return lines of ``key value``: the origin and the value by key."""
    path = folder / name
    if not path.is_file():
        if optional:
            return {}
        raise ValueError(f"{folder}: there is no `{name}`: a Kaldi data folder needs it.")
    rows: dict[str, tuple[str, str]] = {}
    for number, line in numbered_lines(path):
        key, value = (*line.strip().split(maxsplit=1), "")[:2]
        if key in rows:
            raise ValueError(f"{path}:{number}: {key!r} appears twice: keep one of the lines.")
        rows[key] = (f"{path}:{number}", value)
    return rows


def _recordings(folder: Path) -> dict[str, str]:
    paths = {}
    for name, (origin, value) in _table(folder, "wav.scp").items():
        value = value.strip()
        if not value:
            raise ValueError(f"{origin}: recording {name!r} has no path.")
        if value.endswith("|") or value.startswith("|"):
            raise ValueError(
                f"{origin}: recording {name!r} is a command ({value!r}), and commands are not "
                "run: write its output to a file (utils/data/... wav-copy) and name that file."
            )
        if ".ark:" in value:
            raise ValueError(
                f"{origin}: recording {name!r} lies in an archive ({value!r}), and archives are "
                "not read: extract it with wav-copy and name the file."
            )
        paths[name] = absolute(value, folder)
    return paths


def _channels(folder: Path) -> dict[str, int]:
    """Return the channel of recordings, from 0: Kaldi writes A, B or numbers from 1."""
    channels = {}
    for name, (origin, value) in _table(folder, "reco2file_and_channel", optional=True).items():
        channel = (value.split() or [""])[-1].upper()
        number = {"A": 0, "B": 1}.get(channel, int(channel) - 1 if channel.isdigit() else -1)
        if number < 0:
            raise ValueError(f"{origin}: the channel must be A, B or a number from 1: {value!r}.")
        channels[name] = number
    return channels


_Segment = tuple[str, float, float | None]


def _segments(folder: Path, recordings: dict[str, str]) -> dict[str, _Segment | str] | None:
    """Recording, start and duration by utterance, or what is wrong; None for whole files."""
    if not (folder / "segments").is_file():
        return None
    parts: dict[str, _Segment | str] = {}
    for name, (origin, value) in _table(folder, "segments").items():
        try:
            parts[name] = _segment(name, value, origin, recordings)
        except ValueError as error:
            parts[name] = str(error)
    return parts


def _segment(name: str, value: str, origin: str, recordings: dict[str, str]) -> _Segment:
    fields = value.split()
    if len(fields) != 3:
        raise ValueError(
            f"{origin}: must be `utterance recording start end`, but is {name} {value!r}."
        )
    recording, start, end = fields[0], _seconds(fields[1], origin), _seconds(fields[2], origin)
    if recording not in recordings:
        raise ValueError(f"{origin}: recording {recording!r} is not in wav.scp.")
    # Kaldi writes an end of -1 for "up to the end of the recording".
    if start < 0 or (end <= start and end != -1):
        raise ValueError(f"{origin}: `end` must exceed `start`, but they are {end}, {start}.")
    return recording, start, None if end == -1 else end - start


def _seconds(value: str, origin: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ValueError(f"{origin}: times must be numbers of seconds, but one is {value!r}.")
    return seconds


def _find(
    folder: Path,
    origin: str,
    name: str,
    recordings: dict[str, str],
    segments: dict[str, _Segment | str] | None,
) -> tuple[str, float | None, float | None]:
    """Return the recording of an utterance, its offset and its duration."""
    if name not in (recordings if segments is None else segments):
        where = "wav.scp" if segments is None else "segments"
        raise ValueError(
            f"{origin}: utterance {name!r} is not in {where}: run utils/fix_data_dir.sh {folder}."
        )
    if segments is None:
        return name, None, None
    segment = segments[name]
    if isinstance(segment, str):
        raise ValueError(segment)
    return segment
