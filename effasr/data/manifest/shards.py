"""Sets of files that are one corpus, and what tar files hold."""

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from effasr.data.audio.embedded import TarMember
from effasr.data.manifest.walk import AUDIO_SUFFIXES
from effasr.untrusted.files import BoundedTar, open_regular

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
