"""Kaldi data folders: ``wav.scp``, ``text``, and optional files."""

import math
from collections.abc import Iterator
from pathlib import Path

from effasr.data.manifest.lines import check_text, numbered_lines
from effasr.data.manifest.row import absolute
from effasr.data.manifest.utterance import (
    FileUtterance,
    FolderFormat,
    ReadOptions,
    RejectedRow,
    Utterance,
)

_FILES = ("wav.scp", "text", "segments", "utt2spk", "utt2lang", "reco2file_and_channel")


def _read(folder: Path, options: ReadOptions) -> Iterator[Utterance]:
    """Read a Kaldi data folder, in the order of ``text``.

    Where ``text`` lacks utterances, the order is that of ``segments``, or of ``wav.scp``. A line
    that cannot be used, or that no other file refers to, is rejected; the others stay.
    """
    rejected: list[RejectedRow] = []
    recordings = _table(folder, "wav.scp", rejected)
    has_segments = (folder / "segments").is_file()
    segments = _table(folder, "segments", rejected) if has_segments else recordings
    speakers = _table(folder, "utt2spk", rejected, optional=True)
    languages = _table(folder, "utt2lang", rejected, optional=True)
    channels = _table(folder, "reco2file_and_channel", rejected, optional=True)
    texts = _table(folder, "text", rejected, optional=options.untranscribed)
    if options.untranscribed:
        texts = {name: (origin, "") for name, (origin, _) in segments.items()} | texts
    # Kaldi counts channels from 1, some programs from 0.
    first = 0 if any(row[1].split()[-1:] == ["0"] for row in channels.values()) else 1
    used = set()
    for name, (origin, text) in texts.items():
        try:
            if name not in segments:
                raise ValueError(
                    f"{origin}: utterance {name!r} is not in "
                    f"{'segments' if has_segments else 'wav.scp'}: run utils/fix_data_dir.sh "
                    f"{folder}."
                )
            recording, offset, duration = name, None, None
            if has_segments:
                recording, offset, duration = _segment(name, segments[name], recordings)
            used.add(recording)
            audio = _audio(recording, recordings[recording], folder)
            channel = _channel(recording, channels, first) if channels else None
        except ValueError as error:
            rejected.append(RejectedRow(name, origin, str(error)))
            continue
        spoken = languages[name][1] if name in languages else None
        yield FileUtterance(
            id=name,
            named=True,
            origin=origin,
            audio=audio,
            text=text,
            prompt=options.default.stating(spoken),
            offset=offset,
            duration=duration,
            channel=channel,
            speaker=speakers[name][1] if name in speakers else None,
            stated=frozenset({"lang"} if spoken else ()),
        )
    yield from rejected
    for name, (origin, _) in segments.items():
        if name not in texts:
            yield RejectedRow(name, origin, f"{origin}: utterance {name!r} has no line in `text`.")
            used.update(segments[name][1].split()[:1] if has_segments else ())
    for name, (origin, _) in recordings.items():
        if has_segments and name not in used:
            yield RejectedRow(name, origin, f"{origin}: no segment is of recording {name!r}.")


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    return [file for name in _FILES if (file := folder / name).is_file()], []


FORMAT = FolderFormat(
    detect=lambda folder: (folder / "wav.scp").is_file(), read=_read, files=_files
)


_Row = tuple[str, str]


def _table(
    folder: Path, name: str, rejected: list[RejectedRow], *, optional: bool = False
) -> dict[str, _Row]:
    """Return the origin and the value by key of lines of ``key value``, each key once."""
    path = folder / name
    if not path.is_file():
        if optional:
            return {}
        raise ValueError(f"{folder}: there is no `{name}`: a Kaldi data folder needs it.")
    rows: dict[str, _Row] = {}
    for number, line in numbered_lines(path, "surrogateescape"):
        origin = f"{path}:{number}"
        key, value = (*line.strip().split(maxsplit=1), "")[:2]
        try:
            check_text(line, origin)
            if key in rows:
                raise ValueError(f"{origin}: {key!r} appears twice: the first line is read.")
        except ValueError as error:
            rejected.append(RejectedRow(f"{name}:{number}", origin, str(error)))
        else:
            rows[key] = (origin, value)
    return rows


def _audio(name: str, row: _Row, folder: Path) -> str:
    origin, value = row
    if not value:
        raise ValueError(f"{origin}: recording {name!r} has no path.")
    is_command = value.endswith("|") or value.startswith("|")
    if is_command or ".ark:" in value:
        raise ValueError(
            f"{origin}: recording {name!r} is {'a command' if is_command else 'in an archive'}, "
            f"{value!r}, which is not {'run' if is_command else 'read'}: beside wav.scp run `awk "
            "'{print $1, $1 \".wav\"}' wav.scp > files.scp; wav-copy scp:wav.scp "
            "scp:files.scp` (Kaldi's), and rename files.scp to wav.scp."
        )
    return absolute(value, folder)


def _channel(recording: str, rows: dict[str, _Row], first: int) -> int:
    """Return the channel of a recording, from 0: A, B or numbers."""
    if recording not in rows:
        raise ValueError(f"recording {recording!r} has no line in reco2file_and_channel: add it.")
    origin, value = rows[recording]
    channel = (value.split() or [""])[-1].upper()
    number = {"A": 0, "B": 1}.get(channel, int(channel) - first if channel.isdecimal() else -1)
    if number < 0:
        raise ValueError(f"{origin}: the channel must be A, B or a number from 1: {value!r}.")
    return number


def _segment(name: str, row: _Row, recordings: dict[str, _Row]) -> tuple[str, float, float | None]:
    """Return recording, start and duration of an utterance."""
    origin, value = row
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
