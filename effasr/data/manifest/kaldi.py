"""Reads Kaldi data folders: ``wav.scp``, ``text``, and optional files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from effasr.data.manifest.lines import numbered_lines
from effasr.data.manifest.utterance import FileUtterance, absolute
from effasr.data.prompt import Prompt

FILES = ("wav.scp", "text", "segments", "utt2spk", "utt2lang")
"""Files that are read in addition to audio."""


def is_kaldi(folder: Path) -> bool:
    """Return whether the folder is a Kaldi data folder."""
    return (folder / "wav.scp").is_file()


def utterances(
    folder: Path, language: str, *, untranscribed: bool = False
) -> Iterator[FileUtterance]:
    """Read a Kaldi data folder, in the order of ``text``.

    Relative paths in ``wav.scp`` are relative to the folder. ``utt2lang`` gives languages. With
    ``untranscribed`` utterances may be missing in ``text``, which need not exist; the order is then
    that of ``segments``, or of ``wav.scp``.

    Raises:
        ValueError: A file is missing or malformed, ``wav.scp`` holds a command, or the files
            do not name the same utterances.
    """
    recordings = _recordings(folder)
    segments = _segments(folder, recordings)
    speakers = _table(folder, "utt2spk", optional=True)
    languages = _table(folder, "utt2lang", optional=True)
    texts = _table(folder, "text", optional=untranscribed)
    if untranscribed:
        known = recordings if segments is None else segments
        texts = {name: (str(folder), "") for name in known} | texts
    for name, (origin, text) in texts.items():
        recording, offset, duration = _find(folder, origin, name, recordings, segments)
        spoken = languages[name][1].strip() if name in languages else language
        yield FileUtterance(
            id=name,
            named=True,
            origin=origin,
            audio=recording,
            text=text.strip(),
            prompt=Prompt(spoken, spoken),
            offset=offset,
            duration=duration,
            speaker=speakers[name][1].strip() if name in speakers else None,
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


def _segments(
    folder: Path, recordings: dict[str, str]
) -> dict[str, tuple[str, float, float | None]] | None:
    """Recording, start and duration by utterance; None where utterances are whole files."""
    if not (folder / "segments").is_file():
        return None
    parts = {}
    for name, (origin, value) in _table(folder, "segments").items():
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
        parts[name] = (recording, start, None if end == -1 else end - start)
    return parts


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
    segments: dict[str, tuple[str, float, float | None]] | None,
) -> tuple[str, float | None, float | None]:
    known = recordings if segments is None else segments
    if name not in known:
        where = "wav.scp" if segments is None else "segments"
        raise ValueError(
            f"{origin}: utterance {name!r} is not in {where}: run utils/fix_data_dir.sh {folder}."
        )
    if segments is None:
        return recordings[name], None, None
    recording, start, duration = segments[name]
    return recordings[recording], start, duration
