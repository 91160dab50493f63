"""Corpora in tar files: NeMo's tarred sets, and WebDataset's shards.

NeMo and WebDataset read shards from front to back; here audio is found by its place in its tar
file, so that a plan may ask for any utterance at any time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from effasr.data.manifest import nemo
from effasr.data.manifest.lines import (
    check_text,
    first_fields,
    has_suffix,
    numbered_lines,
    parse_object,
)
from effasr.data.manifest.row import ManifestRow, absolute
from effasr.data.manifest.shards import (
    TEXT_SUFFIXES,
    Entry,
    entries,
    expand,
    is_pattern,
    of_one_split,
)
from effasr.data.manifest.utterance import FolderFormat, ReadOptions, RejectedRow, Utterance
from effasr.data.manifest.walk import AUDIO_SUFFIXES

_NUMBER = re.compile(r"(\d+)\D*$")
_SUB = re.compile(r"(.+)-sub\d+(\.\w+)?")
_TARS = (".tar", ".tar.gz", ".tgz")


def _manifests(path: Path) -> list[Path]:
    """Return the manifests of a set of NeMo; none of anything else."""
    if is_pattern(path, ".json"):
        return expand(path)
    if path.is_dir():
        whole = path / "tarred_audio_manifest.json"
        sharded = sorted((path / "sharded_manifests").glob("manifest_*.json"), key=_shard_of_name)
        return [whole] if whole.is_file() else sharded
    if not has_suffix(path, (".json", ".jsonl")):
        return []
    try:
        row = ManifestRow(first_fields(path), path, 1, str(path))
        audio = row.values.get("audio_filepath")
        if not isinstance(audio, str) or os.path.lexists(absolute(audio, path.parent)):
            return []
        return [path] if _shard(row) in _tars(path) else []
    except ValueError:
        return []


def _shard_of_name(path: Path) -> int:
    match = _NUMBER.search(path.name.partition(".")[0])
    return int(match[1]) if match else -1


def _shard(row: ManifestRow) -> int:
    """Return the number of the tar file of a line: its own, or that of a sharded manifest."""
    value = row.values.get("shard_id")
    value = _shard_of_name(row.path) if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise row.error(f"`shard_id` must be a whole number, but is {value!r}.", "shard_id")
    return value


def _tars(manifest: Path) -> dict[int, Path]:
    """Return the tar files beside a manifest by their numbers."""
    folder = manifest.parent
    if folder.name.startswith("sharded"):
        folder = folder.parent
    paths = sorted(folder.glob("*.tar"), key=lambda path: path.name.startswith("audio"))
    return {_shard_of_name(path): path.absolute() for path in paths}


@dataclass(slots=True)
class _Shard:
    """The audio files of a tar file, and those that a line has named."""

    entries: dict[str, Entry] = field(default_factory=dict)
    problems: list[Entry] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, path: Path) -> _Shard:
        shard = cls()
        for entry in entries(path):
            is_audio = entry.place.size and entry.text is None
            if not is_audio or shard.entries.setdefault(entry.name, entry) is not entry:
                problem = entry.problem or f"{path}: {entry.name}: comes twice: the first is read."
                if entry.text is None:
                    shard.problems.append(Entry(entry.name, entry.place, problem=problem))
        return shard

    def rejected(self) -> Iterator[RejectedRow]:
        unused = [entry for name, entry in self.entries.items() if name not in self.used]
        for entry in [*self.problems, *unused]:
            problem = entry.problem or f"{entry.place.path}: {entry.name}: no line names it."
            yield _rejected(entry, problem)


def _rejected(entry: Entry, problem: str) -> RejectedRow:
    return RejectedRow(entry.name, entry.place.path, problem, entry.place.path)


def _read_nemo(path: Path, options: ReadOptions) -> Iterator[Utterance]:
    shards: dict[int, _Shard] = {}
    manifests = _manifests(path)
    tars = _tars(manifests[0])
    for manifest in manifests:
        for number, line in numbered_lines(manifest, "surrogateescape"):
            try:
                row = ManifestRow.parse(line, manifest, number)
                shard_id = _shard(row)
                if shard_id not in tars:
                    raise row.error(f"there is no tar file of shard {shard_id}.", "shard_id")
            except ValueError as error:
                yield RejectedRow(f"{manifest.name}:{number}", f"{manifest}:{number}", str(error))
                continue
            if shard_id not in shards:
                shards[shard_id] = _Shard.of(tars[shard_id])
            try:
                yield _of_line(row, tars[shard_id], shards[shard_id], options)
            except ValueError as error:
                yield RejectedRow(
                    *(f"{manifest.name}:{number}", row.origin, str(error)),
                    audio=str(tars[shard_id]),
                )
    for shard in shards.values():
        yield from shard.rejected()
    if len(manifests) == 1 and "shard" not in manifests[0].parent.name:
        for number in sorted(tars.keys() - shards.keys()):
            yield RejectedRow(
                *(tars[number].name, str(tars[number]), f"{tars[number]}: no line names it."),
                audio=str(tars[number]),
            )


def _of_line(row: ManifestRow, tar: Path, shard: _Shard, options: ReadOptions) -> Utterance:
    name = str(PurePosixPath(row.string("audio_filepath")))
    stem = PurePosixPath(name).stem
    if name not in shard.entries and (match := _SUB.fullmatch(name)) is not None:
        # The second and later parts of a recording are named -sub1, -sub2 ...
        name = f"{match[1]}{match[2] or ''}"
    entry = shard.entries.get(name)
    if entry is None:
        raise row.error(f"{name!r} is not in {tar}: the set is incomplete.", "audio_filepath")
    shard.used.add(name)
    if entry.problem is not None:
        raise row.error(entry.problem)
    return nemo.parse_embedded(row, entry.place, stem, options)


def _nemo_files(path: Path) -> tuple[list[Path], list[Path]]:
    manifests = _manifests(path)
    return manifests, sorted(_tars(manifests[0]).values())


NEMO = FolderFormat(lambda path: bool(_manifests(path)), _read_nemo, _nemo_files)


def _shards(path: Path) -> list[Path]:
    """Return the tar files of WebDataset; none of anything else."""
    if is_pattern(path, _TARS[0]):
        return expand(path)
    if path.is_file():
        return [path] if has_suffix(path, _TARS) else []
    if not path.is_dir():
        return []
    files = sorted(path.iterdir())
    if any(file.suffix.lower() in AUDIO_SUFFIXES for file in files):
        return []
    return [file for file in files if has_suffix(file, _TARS) and file.is_file()]


def _read_web(path: Path, options: ReadOptions) -> Iterator[Utterance]:
    shards = _shards(path)
    for shard in of_one_split(path, shards) if path.is_dir() else shards:
        yield from _of_shard(shard, options)


WEB = FolderFormat(lambda path: bool(_shards(path)), _read_web, lambda path: ([], _shards(path)))


@dataclass(slots=True)
class _Sample:
    """The files of a key."""

    audio: Entry | None = None
    texts: dict[str, Entry] = field(default_factory=dict)  # by suffix


def _of_shard(path: Path, options: ReadOptions) -> Iterator[Utterance]:
    samples: dict[str, _Sample] = {}
    for entry in entries(path):
        if entry.problem is not None:
            yield _rejected(entry, entry.problem)
            continue
        stem, dot, suffix = entry.name.rpartition(".")
        sample = samples.setdefault(stem, _Sample())
        if suffix.lower() in ("json", "txt") or f"{dot}{suffix.lower()}" in TEXT_SUFFIXES:
            is_first = sample.texts.setdefault(suffix, entry) is entry
        else:
            is_first = sample.audio is None
            sample.audio = sample.audio or entry
        if not is_first:
            yield _rejected(entry, f"{path}: {entry.name}: its key comes twice: it is left out.")
    for key, sample in samples.items():
        if sample.audio is None:
            for entry in sample.texts.values():
                yield _rejected(entry, f"{path}: {entry.name}: there is no audio of its key.")
        elif not sample.texts and not options.untranscribed:
            problem = f"{path}: {sample.audio.name}: there is no text of its key."
            yield _rejected(sample.audio, problem)
        else:
            yield _of_sample(path, key, sample, options)


def _of_sample(path: Path, key: str, sample: _Sample, options: ReadOptions) -> Utterance:
    assert sample.audio is not None
    origin = f"{path}: {key}"
    row = ManifestRow({}, path, 0, origin)
    try:
        values = {}
        plain = []
        for suffix, entry in sample.texts.items():
            text = entry.text or ""
            if suffix.endswith("json"):
                values |= parse_object(text, origin)
            else:
                check_text(text, origin)
                values[suffix] = text.strip()
                plain.append(suffix)
        row.values = values
    except ValueError as error:
        return _rejected(sample.audio, str(error))
    text_name = nemo.text_of_several(row, options, plain)
    try:
        return nemo.parse_whole(row, text_name, sample.audio.place, key, options)
    except ValueError as error:
        return _rejected(sample.audio, str(error))
