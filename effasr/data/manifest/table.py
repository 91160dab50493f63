"""Tables of utterances: CSV and TSV, with or without a header, beside the audio or naming it."""

import csv
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from effasr.data.manifest import nemo
from effasr.data.manifest.folder import with_others
from effasr.data.manifest.lines import check_text, has_suffix, numbered_lines
from effasr.data.manifest.row import AUDIO, READ, TEXT, ManifestRow, unread
from effasr.data.manifest.utterance import FolderFormat, ReadOptions, RejectedRow, Utterance

log = logging.getLogger(__name__)

SUFFIXES = (".csv", ".tsv")
_DELIMITERS = ("\t", ";", "|", ",")
_MAX_ROW_LINES = 50  # of a field in quotes that has line breaks
_MISSING = frozenset(("nan", "NaN", "None", "NULL", "<NA>"))  # a missing text of pandas, of SQL
_LJ_SPEECH = ("file_name", "raw text", "text")
# Common Voice's counts and descriptions, which change nothing.
_IGNORED = frozenset(
    (
        *("sentence_id", "sentence_domain", "up_votes", "down_votes", "age", "gender", "accents"),
        *("accent", "variant", "segment"),
    )
)


def _file(path: Path) -> Path | None:
    """Return the table of a manifest: the file itself, or the metadata.csv of a folder."""
    if has_suffix(path, SUFFIXES) and path.is_file():
        return path if names_audio(path) else None
    if not path.is_dir() or (path / "metadata.jsonl").is_file():
        return None
    names = ["metadata.csv", "metadata.tsv"]
    if (path / "clips").is_dir():  # Common Voice
        names += ["train.tsv", "validated.tsv", "dev.tsv", "test.tsv"]
    return next((path / name for name in names if (path / name).is_file()), None)


def names_audio(path: Path) -> bool:
    """Return whether a table is one of utterances; `effasr plan` reads tables of mere lengths."""
    try:
        header_of(next(numbered_lines(path), (0, ""))[1], path)
    except ValueError:
        return False
    return True


def _read(path: Path, options: ReadOptions) -> Iterator[Utterance]:
    file = _file(path)
    assert file is not None
    if file == path:
        return _utterances(file, options)
    log.warning("%s: a folder with a table: %s is read.", path, file.name)
    utterances = _utterances(file, options)
    # The clips of Common Voice are those of several tables.
    return utterances if file.stem != "metadata" else with_others(utterances, path)


def _utterances(file: Path, options: ReadOptions) -> Iterator[Utterance]:
    folders = [file.parent, file.parent / "clips", file.parent / "wavs"]
    for row in rows(file, options.text_column):
        if isinstance(row, RejectedRow):
            yield row
            continue
        try:
            utterance = nemo.parse(row, options)
        except ValueError as error:
            yield RejectedRow(f"{file.name}:{row.line}", row.origin, str(error))
            continue
        name = str(row.values.get(row.first(AUDIO)))
        yield replace(utterance, audio=_locate(name, utterance.audio, folders))


FORMAT = FolderFormat(
    detect=lambda path: _file(path) is not None,
    read=_read,
    files=lambda path: ([file], []) if (file := _file(path)) is not None else None,
)


def _locate(name: str, path: str, folders: Sequence[Path]) -> str:
    """Return where a file is: beside the table, or in the folder that its corpus has for audio."""
    for folder in folders:
        for suffix in ("", ".wav", ".flac", ".mp3", ".ogg", ".opus"):
            candidate = os.path.join(folder, name + suffix)
            if os.path.isfile(candidate):
                return os.path.abspath(candidate)
    return path


def rows(path: Path, text_column: str | None = None) -> Iterator[ManifestRow | RejectedRow]:
    """Yield the rows of a table, each under the names of its header."""
    lines = numbered_lines(path, "surrogateescape")
    number, header = next(lines, (0, ""))
    if not number:
        return
    delimiter, names = header_of(header, path)
    pending: list[tuple[int, str]] = []
    if names is None:
        names, pending = ["file_name", "text"], [(number, header)]
        if header.count(delimiter) == 2:
            names = list(_LJ_SPEECH)
    text = text_column or next((name for name in TEXT if name in names), "")
    unknown = unread(names, text) - _IGNORED
    if unknown:
        listed = ", ".join(repr(name) for name in names if name in unknown)
        log.warning("%s: columns that are not read: %s.", path, listed)
    missing = 0
    for number, fields in _split(pending, lines, delimiter, len(names)):
        origin = f"{path}:{number}"
        try:
            if isinstance(fields, str):
                raise ValueError(f"{origin}: {fields}")
            check_text("".join(fields), origin)
        except ValueError as error:
            yield RejectedRow(f"{path.name}:{number}", origin, str(error))
            continue
        values = {name: value for name, value in zip(names, fields, strict=True) if name}
        for name in {text, *TEXT} & values.keys():
            if values[name].strip() in _MISSING:
                values[name], missing = "", missing + 1
        yield ManifestRow(values, path, number, origin)
    if missing:
        log.warning(
            "%s: texts that are missing, as they are nan, NaN, None, NULL or <NA>: %d. Write JSON "
            "lines to keep them as words.",
            *(path, missing),
        )


def header_of(line: str, path: Path) -> tuple[str, list[str] | None]:
    """Return the delimiter and the columns; None for LJSpeech's tables, which have no header."""
    for delimiter in _DELIMITERS:
        names = [name.strip() for name in _fields(line, delimiter)]
        names = [name.lower() if name.lower() in READ else name for name in names]
        if not set(names).isdisjoint(AUDIO) and len(names) > 1:
            if twice := next((name for name in names if name and names.count(name) > 1), None):
                raise ValueError(f"{path}: column {twice!r} comes twice: remove or rename one.")
            return delimiter, names
    first, *others = line.split("|")
    # LJSpeech has a name and two spellings of its text. A speaker is third, or second, where the
    # first column is a file.
    if len(others) == 1 or (len(others) == 2 and not Path(first).suffix):
        return "|", None
    raise ValueError(
        f"{path}: the first line must name the columns, among them one of {', '.join(AUDIO[:6])} "
        f"and one of {', '.join(TEXT[:4])}, but is {line.strip()[:80]!r}."
    )


def _fields(line: str, delimiter: str) -> list[str]:
    try:
        # One string: a text may have other line separators of Unicode.
        return next(csv.reader([line.rstrip("\r\n")], delimiter=delimiter), [])
    except csv.Error:  # such as a field of more than 131,072 characters
        return []


def _split(
    pending: list[tuple[int, str]],
    lines: Iterator[tuple[int, str]],
    delimiter: str,
    width: int,
) -> Iterator[tuple[int, list[str] | str]]:
    """Yield the number and the fields of each row, or why it has none.

    Quotes are those of CSV where a row has all its columns so. Else they are letters, as Common
    Voice writes them: a row never swallows others because its text begins with a quote.
    """
    while (row := pending.pop(0) if pending else next(lines, None)) is not None:
        number, line = row
        plain = line.rstrip("\r\n").split(delimiter)
        if line.count('"') % 2 == 0:
            quoted = _fields(line, delimiter)
            if len(quoted) == width:
                yield number, quoted
                continue
        if line.count('"') % 2 and not pending and (another := next(lines, None)) is not None:
            pending.append(another)
        goes_on = bool(pending) and len(pending[0][1].split(delimiter)) != width
        if len(plain) == width and not (line.count('"') % 2 and goes_on):
            yield number, plain
            continue
        if line.count('"') % 2:
            # A field in quotes may have line breaks; if it never ends, the lines are rows again.
            text, used = line, []
            while text.count('"') % 2 and len(used) < _MAX_ROW_LINES:
                another = pending.pop(0) if pending else next(lines, None)
                if another is None:
                    break
                used.append(another)
                text += another[1]
            quoted = _fields(text, delimiter)
            if text.count('"') % 2 == 0 and len(quoted) == width:
                yield number, quoted
                continue
            pending[:0] = used
            if len(plain) == width:
                yield number, plain
                continue
        yield (
            number,
            (
                f"has {len(plain)} columns, but the first line has {width}: put fields with "
                f"{'tabs' if delimiter == chr(9) else repr(delimiter)} in double quotes."
            ),
        )
