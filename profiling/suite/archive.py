"""All results in one file, so that they come back from a machine that gives back only a few."""

from __future__ import annotations

import io
import os
import tarfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MOST_BYTES = 15 * 2**20
"""Size limit of the archive, a little below the transfer limit of such machines."""
_LARGEST_READ = 256 * 2**20
_ORDER = (".md", ".csv", ".json", ".jsonl", ".log", ".html", ".so")
_NOTE = "left_out.txt"
_sizes: dict[tuple[str, int, int], int] = {}


def _files(folder: Path) -> list[Path]:
    """Return the files to pack: results first, and large ones such as traces last."""

    def order(path: Path) -> tuple[int, int, str]:
        kind = _ORDER.index(path.suffix) if path.suffix in _ORDER else len(_ORDER)
        # Commands are at work there: what has gone meanwhile is the last.
        try:
            return kind, path.stat().st_size, str(path)
        except OSError:
            return len(_ORDER), _LARGEST_READ, str(path)

    found = [
        path
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(".tar.gz")
    ]
    return sorted(found, key=order)


def _compressed(path: Path, status: os.stat_result, data: bytes) -> int:
    """Return bytes that it takes in the archive, about."""
    key = str(path), status.st_size, status.st_mtime_ns
    if key not in _sizes:
        _sizes[key] = len(zlib.compress(data, 6)) + 1024
    return _sizes[key]


def packed(folder: Path, most: int = MOST_BYTES) -> bytes:
    """Return the archive of a folder; what would make it too large is named in ``left_out.txt``.

    Args:
        folder: Folder of the results.
        most: Bytes that it may have.
    """
    buffer, used, left_out = io.BytesIO(), 0, []
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
        for path in _files(folder):
            name = str(path.relative_to(folder))
            try:
                status = path.stat()
                data = b"" if status.st_size > _LARGEST_READ else path.read_bytes()
            except OSError as error:
                left_out.append(f"{name}: {error.strerror}")
                continue
            if status.st_size > _LARGEST_READ:
                left_out.append(f"{name}: {status.st_size} bytes")
                continue
            size = _compressed(path, status, data)
            if used + size > most:
                left_out.append(f"{name}: {size} bytes compressed")
                continue
            used += size
            _add(archive, name, data, status.st_mtime)
        if left_out:
            _add(archive, _NOTE, "".join(f"{line}\n" for line in left_out).encode(), 0.0)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes, modified: float) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = len(data), int(modified)
    archive.addfile(entry, io.BytesIO(data))


def write(path: Path, data: bytes) -> None:
    """Replace a file atomically.

    Raises:
        OSError: It cannot be written; what was there before still is.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        # What was written of it takes the space that others need.
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_somewhere(folders: Iterable[Path], name: str, data: bytes) -> tuple[Path | None, str]:
    """Write a file into the first folder that takes it.

    Returns:
        Where it is, or None, and why it is not in the folders before; empty where it is in the
        first one.
    """
    reasons = []
    for folder in folders:
        try:
            write(folder / name, data)
        except OSError as error:
            reasons.append(f"{folder / name}: {error.strerror or error}")
            continue
        return folder / name, "; ".join(reasons)
    return None, "; ".join(reasons)


def unpack(path: Path, folder: Path) -> None:
    """Put what an earlier call has packed where this one goes on.

    Raises:
        ValueError: It is no archive of a suite.
    """
    try:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise ValueError(
            f"`--continue-from` must name the archive of an earlier call, but {path} cannot be "
            f"unpacked: {error}. Name another file, or none."
        ) from error
