"""Hugging Face's datasets: Parquet files, and folders that `save_to_disk` wrote."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from effasr.data.audio.table_rows import Table, TableRow, open_table
from effasr.data.manifest import nemo
from effasr.data.manifest.row import AUDIO, READ, TEXT, ManifestRow
from effasr.data.manifest.tarred import expand, is_pattern, of_one_split
from effasr.data.manifest.utterance import FolderFormat, ReadOptions, RejectedRow, Utterance
from effasr.untrusted.documents import read_json_object
from effasr.untrusted.files import plain_name

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

_SUFFIXES = (".parquet", ".arrow")
_LARGE_GROUP = 64 << 20  # bytes, of which a process caches 256 MB


def _files(path: Path) -> list[Path]:
    """Return the files of a dataset; none of anything else."""
    if any(is_pattern(path, suffix) for suffix in _SUFFIXES):
        return expand(path)
    if path.is_file():
        return [path] if path.suffix in _SUFFIXES else []
    if (path / "dataset_dict.json").is_file():
        splits = sorted(state.parent.name for state in path.glob("*/state.json"))
        raise ValueError(
            f"{path}: has several splits, {', '.join(splits)}: name one, such as "
            f"{path / (splits or ['train'])[0]}."
        )
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return _saved_files(path)
    return sorted(path.glob("*.parquet")) or sorted((path / "data").glob("*.parquet"))


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of a folder of `save_to_disk`."""
    path = folder / "state.json"
    state = read_json_object(path)
    if state.get("_indices_data_files"):
        raise ValueError(
            f"{folder}: has a selection of its rows, which is not read: save what "
            "`dataset.flatten_indices()` returns."
        )
    files = state.get("_data_files")
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        raise ValueError(f"{path}: `_data_files` must be a list of objects: save it again.")
    names = [plain_name(file.get("filename"), f"{path}: `filename`") for file in files]
    return [folder / name for name in names]


def _read(path: Path, options: ReadOptions) -> Iterator[Utterance]:
    files = _files(path)
    if files and (size := open_table(str(files[0].absolute())).decoded_bytes) > _LARGE_GROUP:
        log.warning(
            "%s: has row groups of %d MB, each of which is decoded to read one of its utterances: "
            "effasr prepare %s OUT --shards 64 makes a copy that is read faster",
            path,
            size >> 20,
            path,
        )
    for file in of_one_split(path, files) if path.is_dir() else files:
        yield from _of_file(file, options)


FORMAT = FolderFormat(lambda path: bool(_files(path)), _read, lambda path: ([], _files(path)))


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of a table that are read."""

    audio: str
    number: int  # of the audio
    content: str | None  # leaf with the audio itself, such as audio.bytes; None for paths alone
    path: str | None  # leaf with the path
    fields: tuple[str, ...]

    @classmethod
    def of(cls, schema: "pa.Schema", path: Path, options: ReadOptions) -> "_Columns":
        audio = _audio_column(schema, path)
        kind = schema.field(audio).type
        leaves = [field.name for field in kind] if _is_struct(kind) else []
        content = f"{audio}.bytes" if "bytes" in leaves else None
        file = f"{audio}.path" if "path" in leaves else None
        if not leaves:
            content, file = (audio, None) if _is_binary(kind) else (None, audio)
        texts = [name for name in TEXT if name in schema.names]
        if options.text_column is not None:
            texts = [name for name in (options.text_column,) if name in schema.names]
        if not texts and not options.untranscribed:
            wanted = f" {options.text_column!r}" if options.text_column is not None else ""
            raise ValueError(
                f"{path}: has no text column{wanted}: name one of {', '.join(schema.names)} by "
                "`--text-column`, or in training by data.text_column."
            )
        fields = tuple(
            name for name in schema.names if name != audio and (name in READ or name in texts)
        )
        return cls(audio, schema.names.index(audio), content, file, fields)


def _is_struct(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_struct(kind)


def _is_binary(kind: Any) -> bool:
    import pyarrow as pa

    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return any(check(kind) for check in checks)


def _audio_column(schema: "pa.Schema", path: Path) -> str:
    """Return the column of audio: a structure or bytes, else one of paths."""
    embedded = [
        field.name
        for field in schema
        if _is_binary(field.type)
        or (_is_struct(field.type) and "bytes" in {child.name for child in field.type})
    ]
    linked = [name for name in AUDIO if name in schema.names]
    names = embedded or linked
    if not names:
        raise ValueError(
            f"{path}: has no audio: no column of audio files, and none is named "
            f"{', '.join(AUDIO[:4])}: its columns are {', '.join(schema.names)}."
        )
    if "audio" not in names and len(embedded) > 1:
        raise ValueError(
            f"{path}: several columns may be the audio, {', '.join(names)}: name it `audio`."
        )
    return "audio" if "audio" in names else names[0]


def _of_file(path: Path, options: ReadOptions) -> Iterator[Utterance]:
    table = open_table(str(path.absolute()))
    columns = _Columns.of(table.schema, path, options)
    if options.unread is not None:
        unread = set(table.schema.names) - {*columns.fields, columns.audio}
        options.unread.update(dict.fromkeys(unread, table.rows))
    for number, first in table.blocks():
        try:
            block = table.block(number, columns.fields)
            places = _places(table, number, columns)
        except (OSError, MemoryError, ValueError, NotImplementedError) as error:
            problem = " ".join(str(error).split())
            raise ValueError(f"{path}: the rows from {first} on are damaged: {problem}") from error
        rows = block.to_pylist() if columns.fields else [{} for _ in places]
        for row, (values, place) in enumerate(zip(rows, places, strict=True), first):
            yield _of_row(
                ManifestRow(values, path, row, f"{path}: row {row}"), *place, columns, options
            )
    if table.problem is not None:
        origin = str(path)
        yield RejectedRow(path.name, origin, f"{path}: {table.problem}.", str(path.absolute()))


def _places(table: Table, number: int, columns: _Columns) -> list[tuple[bool, str | None]]:
    """Return of each row whether its audio is in the table, and its path."""
    content, audio = columns.content, columns.audio
    is_whole = content is not None and table.has_all(number, content)
    column = table.block(number, [columns.path if columns.path and is_whole else audio]).column(0)
    leaves = {audio: column}
    if _is_struct(column.type):
        names = (f"{audio}.{field.name}" for field in column.type)
        leaves |= dict(zip(names, column.flatten(), strict=True))
    paths, embedded = [None] * len(column), [is_whole] * len(column)
    if columns.path in leaves:
        paths = leaves[columns.path].to_pylist()
    if content in leaves and not is_whole:
        embedded = leaves[content].is_valid().to_pylist()
    return list(zip(embedded, paths, strict=True))


def _of_row(
    row: ManifestRow, embedded: bool, audio: str | None, columns: _Columns, options: ReadOptions
) -> Utterance:
    container = str(row.path.absolute())
    text_name = nemo.text_of_several(row, options)
    name = f"{row.path.stem}-{row.line}"
    try:
        if embedded:
            place = TableRow(container, row.line, columns.number)
            stem = PurePath(audio).stem if audio else name
            return nemo.parse_whole(row, text_name, place, stem, options)
        if not audio:
            raise row.error(f"`{columns.audio}` is empty.", columns.audio)
        others = {key: row.values[key] for key in row.values.keys() - set(AUDIO)}
        row.values = others | {"audio_filepath": audio}
        return nemo.parse(row, replace(options, text_column=text_name))
    except ValueError as error:
        return RejectedRow(name, row.origin, str(error), container)
