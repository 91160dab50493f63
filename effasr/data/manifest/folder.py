"""Folders of audio files with transcripts."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from effasr.data.manifest.lines import numbered_lines
from effasr.data.manifest.row import ManifestRow, absolute
from effasr.data.manifest.utterance import FileUtterance, FolderFormat, ReadOptions
from effasr.data.manifest.walk import walk
from effasr.data.prompt import Prompt

log = logging.getLogger(__name__)

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3")
_TEXT_FIELDS = ("text", "transcription", "sentence")


def _read(folder: Path, options: ReadOptions) -> Iterator[FileUtterance]:
    """Read a folder in one of three arrangements, in a fixed order.

    - ``metadata.csv`` or ``metadata.jsonl`` with ``file_name`` and ``text``, ``transcription``
      or ``sentence``, as Hugging Face's audiofolder has it;
    - LibriSpeech's ``*.trans.txt``, lines of ``name TEXT`` beside the audio files;
    - ``NAME.txt`` beside each ``NAME.wav`` (or .flac, .ogg, .opus, .mp3), at any depth.

    Links to folders are followed; names that begin with a dot are left out.
    """
    for name in ("metadata.jsonl", "metadata.csv"):
        if (folder / name).is_file():
            return _from_table(folder / name, options)
    files = all_files(folder)
    transcripts = [path for path in files if path.name.endswith(".trans.txt")]
    if transcripts:
        return _from_librispeech(transcripts, options.language)
    return _from_neighbours(folder, files, options)


FORMAT = FolderFormat(detect=lambda folder: True, read=_read, files=lambda folder: None)


def all_files(folder: Path) -> list[Path]:
    """Return the files below a folder, sorted; warn of each folder that cannot be read."""
    unreadable: list[OSError] = []
    files = sorted(map(Path, walk(folder, unreadable)))
    for error in unreadable:
        log.warning("%s is left out: it cannot be read: %s", error.filename, error.strerror)
    return files


def _from_table(path: Path, options: ReadOptions) -> Iterator[FileUtterance]:
    for row in _rows(path):
        audio = row.audio("file_name")
        field = next((name for name in _TEXT_FIELDS if row.values.get(name) is not None), "text")
        name = row.optional_string("id")
        yield FileUtterance(
            id=name or Path(row.string("file_name")).stem,
            named=name is not None,
            origin=row.origin,
            audio=audio,
            text=row.transcript(field, untranscribed=options.untranscribed),
            prompt=row.prompt(options.language),
            duration=None if path.suffix == ".csv" else row.seconds("duration"),
        )


def _rows(path: Path) -> Iterator[ManifestRow]:
    if path.suffix == ".jsonl":
        for number, line in numbered_lines(path):
            yield ManifestRow.parse(line, path, number)
        return
    reader = csv.DictReader(line for _, line in numbered_lines(path))
    for count, values in enumerate(_csv_rows(reader, path), 1):
        row = ManifestRow(values, path, reader.line_num, f"{path}: row {count}")
        if None in values or None in values.values():
            raise row.error(
                f"must have {len(reader.fieldnames or ())} columns, as the first line has: put "
                "fields with commas in double quotes."
            )
        yield row


def _csv_rows(reader: csv.DictReader[str], path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from reader
    except csv.Error as error:
        raise ValueError(f"{path}: row {reader.line_num}: not valid CSV: {error}.") from error


def _from_librispeech(transcripts: list[Path], language: str) -> Iterator[FileUtterance]:
    for path in transcripts:
        for number, line in numbered_lines(path):
            name, _, text = line.strip().partition(" ")
            yield FileUtterance(
                id=name,
                named=True,
                origin=f"{path}:{number}",
                audio=absolute(f"{name}.flac", path.parent),
                text=text.strip(),
                prompt=Prompt(language, language),
            )


def _from_neighbours(
    folder: Path, files: list[Path], options: ReadOptions
) -> Iterator[FileUtterance]:
    files = [path for path in files if path.suffix.lower() in AUDIO_SUFFIXES]
    if not files:
        raise ValueError(
            f"{folder}: not a folder of utterances: it needs cuts.jsonl.gz (from `effasr "
            f"prepare`), wav.scp (Kaldi), metadata.csv, metadata.jsonl, or audio files "
            f"({', '.join(AUDIO_SUFFIXES)}) with a .txt beside each."
        )
    silent = [path for path in files if not path.with_suffix(".txt").is_file()]
    if silent and not options.untranscribed:
        raise ValueError(
            f"{silent[0]}: there is no {silent[0].with_suffix('.txt').name} beside it (and so for "
            f"{len(silent)} of {len(files)} audio files): write the transcripts, or move the "
            "files away."
        )
    for path in files:
        transcript = path.with_suffix(".txt")
        lines = numbered_lines(transcript) if transcript.is_file() else ()
        words = [word for _, line in lines for word in line.split()]
        yield FileUtterance(
            id=path.stem,
            named=False,
            origin=str(transcript),
            audio=str(path.absolute()),
            text=" ".join(words),
            prompt=Prompt(options.language, options.language),
        )
