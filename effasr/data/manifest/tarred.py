"""Corpora in tar files: NeMo's tarred sets, and WebDataset's shards.

NeMo and WebDataset read shards from front to back; here audio is found by its place in its tar
file, so that a plan may ask for any utterance at any time.
"""

import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from effasr.data.audio.embedded import TarMember
from effasr.data.manifest import nemo
from effasr.data.manifest.lines import (
    check_text,
    first_fields,
    has_suffix,
    numbered_lines,
    parse_object,
)
from effasr.data.manifest.row import ManifestRow, absolute
from effasr.data.manifest.utterance import FolderFormat, ReadOptions, RejectedRow, Utterance
from effasr.data.manifest.walk import AUDIO_SUFFIXES
from effasr.untrusted.files import BoundedTar, open_regular

# Sets of files that are one corpus, and what tar files hold.


TEXT_SUFFIXES = (".json", ".txt", ".text", ".transcript")

_RANGE = re.compile(r"(?:_OP_|\{)(\d+)\.\.(\d+)(?:_CL_|\})")
_OF = re.compile(r"(.+?)[-_.]\d+-of-\d+\b")
_SPLIT = re.compile(r"(?:^|[-_.])(train|training|validation|valid|val|dev|eval|test)(?=[-_.\d]|$)")
_MOST_FILES = 1_000_000
_TEXT_BYTES = 1 << 20
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ": ("xz", "unxz"),
    b"(\xb5/\xfd": ("zstd", "unzstd"),
}


def is_pattern(path: Path, suffix: str) -> bool:
    """Return whether a path stands for several: ``{000..511}``, ``_OP_0..511_CL_`` or ``*``."""
    has_range = "*" in path.name or _RANGE.search(str(path)) is not None
    return has_range and path.name.endswith(suffix) and not path.exists()


def expand(pattern: Path) -> list[Path]:
    """Return the files that a pattern stands for, all of which exist."""
    paths = list(_expanded(pattern))
    if missing := [path for path in paths if not path.is_file()]:
        raise ValueError(
            f"{pattern}: stands for {len(paths)} files, but {len(missing)} are missing, such as "
            f"{missing[0].name}: name the range that is there."
        )
    if not paths:
        raise ValueError(f"{pattern}: matches no file.")
    return paths


def _expanded(pattern: Path) -> Iterator[Path]:
    match = _RANGE.search(str(pattern))
    if match is None:
        yield from sorted(pattern.parent.glob(pattern.name)) if "*" in pattern.name else [pattern]
        return
    first, last = int(match[1]), int(match[2])
    if not 0 <= last - first < _MOST_FILES:
        raise ValueError(
            f"{pattern}: a range must begin with its least number and have at most {_MOST_FILES} "
            "files."
        )
    # As in a shell: zeros before the first number make all numbers as long.
    width = len(match[1]) if match[1].startswith("0") else 0
    before, after = str(pattern)[: match.start()], str(pattern)[match.end() :]
    for number in range(first, last + 1):
        yield from _expanded(Path(f"{before}{number:0{width}}{after}"))


def of_one_split(folder: Path, paths: list[Path]) -> list[Path]:
    """Return the files of a folder, which must not be of several splits such as train and test."""
    splits: dict[str, Path] = {}
    for path in paths:
        match = _OF.match(path.name) or _SPLIT.search(path.stem)
        splits.setdefault(match[1] if match else "", path)
    if len(splits) > 1:
        example = next(iter(splits))
        name = f"{example}*{paths[0].suffix}" if example else next(iter(splits.values())).name
        raise ValueError(
            f"{folder}: has several splits, {', '.join(sorted(filter(None, splits)))}"
            f"{' and others' if '' in splits else ''}: name one, such as '{folder / name}'."
        )
    return paths


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a tar file, or what is wrong with one."""

    name: str
    place: TarMember
    text: str | None = None  # of a small text; bytes that are not UTF-8 are surrogates
    problem: str | None = None


def entries(path: Path) -> Iterator[Entry]:
    """Yield the audio files and texts of a tar file, in order; only headers and texts are read.

    An entry with a problem is also what stands for the members behind damage.
    """
    with open_regular(path) as opened:
        head = opened.read(6)
        for magic, (name, program) in _COMPRESSED.items():
            if head.startswith(magic):
                plain = path.stem if path.suffix != ".tar" else f"{path.stem}-plain.tar"
                raise ValueError(
                    f"{path}: is compressed by {name}, so audio cannot be located in it: "
                    f"`{program} -c {path} > {path.with_name(plain)}`."
                )
        size = opened.seek(0, 2)
        opened.seek(0)
        if not size:
            yield _problem(path, "the tar file is empty")
            return
        try:
            file = tarfile.open(fileobj=cast(BinaryIO, BoundedTar(opened)), mode="r:")  # noqa: SIM115
        except (tarfile.TarError, OSError, ValueError) as error:
            raise ValueError(
                f"{path}: cannot be read as a tar file: {' '.join(str(error).split())}."
            ) from error
        count, last = 0, None
        try:
            for info in file:
                if (entry := _entry(path, file, info, size)) is not None:
                    count += 1
                    yield entry
                last = info
        except (tarfile.TarError, OSError, ValueError) as error:
            # The last member is cut short, which its own entry says.
            if last is None or last.offset_data + last.size <= size:
                yield _problem(path, f"cannot be read to its end: {' '.join(str(error).split())}")
            return
        if ending := _ending(opened, file.offset):
            yield _problem(path, ending)
        elif not count:
            yield _problem(path, "there is no audio in the tar file")


def _problem(path: Path, problem: str) -> Entry:
    return Entry(path.name, TarMember(str(path), 0, 0), problem=f"{path}: {problem}.")


def _ending(file: BinaryIO, offset: int) -> str | None:
    """Return what is wrong with a tar file behind its last member."""
    file.seek(offset)
    if not (block := file.read(tarfile.BLOCKSIZE)):
        return "ends without its end mark, so members may be missing: copy it again"
    while block:
        if block.strip(b"\0"):
            return (
                f"has more than is read behind byte {offset}, either damage or another tar file "
                "that was joined to it: unpack it by `tar -x --ignore-zeros`, and pack it again"
            )
        block = file.read(1 << 20)
    return None


def _entry(path: Path, file: tarfile.TarFile, info: tarfile.TarInfo, size: int) -> Entry | None:
    """Return an audio file or a text; None for folders, hidden files and others."""
    name = str(PurePosixPath(info.name))  # without ./ and doubled slashes
    parts = name.split("/")
    # macOS adds ._NAME beside each file, and folders of its own.
    if info.isdir() or parts[-1].startswith(".") or "__MACOSX" in parts:
        return None
    suffix = PurePosixPath(name).suffix.lower()
    if suffix not in AUDIO_SUFFIXES and suffix not in TEXT_SUFFIXES:
        return None
    place = TarMember(str(path.absolute()), info.offset_data, info.size)
    problem = text = None
    if not info.isfile():
        problem = "is a link: pack with `tar --dereference --hard-dereference`"
    elif info.issparse():
        problem = "is stored with holes: pack without `tar --sparse`"
    elif info.offset_data + info.size > size:
        problem = "the tar file was cut short inside of it: copy it again"
    elif suffix in TEXT_SUFFIXES and info.size > _TEXT_BYTES:
        problem = f"a text must have at most {_TEXT_BYTES} bytes, but has {info.size}"
    elif suffix in TEXT_SUFFIXES:
        content = file.extractfile(info)
        assert content is not None
        text = content.read().decode("utf-8-sig", "surrogateescape")
    if problem is not None:
        problem = f"{path}: {name}: {problem}."
    return Entry(name, place, text, problem)


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
    def of(cls, path: Path) -> "_Shard":
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
