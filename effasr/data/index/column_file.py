"""Stores arrays in one checksummed file that processes map and share.

The file begins with a line of JSON, filled up to `_HEADER` bytes with spaces: ``format``, ``key``,
``size`` of the whole, and for each column its type, its place, its length and the CRC-32 of its
bytes. Columns begin at multiples of `_ALIGNMENT`.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from effasr.data.atomic_files import atomic_file

_FORMAT = "effasr columns 1"
_HEADER = 16_384
_ALIGNMENT = 4_096
_BLOCK = 2**24
"""Bytes that are looked at together."""


class Damaged(ValueError):
    """A file of columns is not what was written."""


def write_columns(
    path: Path,
    key: str,
    columns: Mapping[str, np.ndarray],
    progress: Callable[[int], None] = lambda size: None,
) -> int:
    """Write a file, in place of one that may be there; readers of that one keep it.

    Returns:
        Bytes of the file.
    """
    header: dict[str, Any] = {"format": _FORMAT, "key": key, "size": 0, "columns": {}}
    with atomic_file(path) as file:
        file.seek(_HEADER)
        for name, values in columns.items():
            place = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
            file.seek(place)
            header["columns"][name] = [
                values.dtype.str,
                place,
                len(values),
                _write(file, values, progress),
            ]
        # A last column without values lies behind the end.
        header["size"] = size = max(file.tell(), _HEADER)
        file.truncate(size)
        file.seek(0)
        file.write(json.dumps(header).encode().ljust(_HEADER - 1) + b"\n")
    return size


def map_columns(path: Path, key: str) -> dict[str, np.ndarray]:
    """Map a file into memory, all of which is read once to check it.

    As long as it is mapped, by this process or one that it forks, `remove_unused` leaves it.

    Returns:
        The columns, by name; they cannot be written to.

    Raises:
        Damaged: The file is not one that was written with this key, or not whole.
        OSError: It cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        header = _header(file, path, key)
        for name, (kind, place, count, checksum) in header["columns"].items():
            if _checksum(file, place, count * np.dtype(kind).itemsize) != checksum:
                raise Damaged(f"{path}: the values of {name!r} are not those that were written")
        with suppress(OSError):
            # Held by the map, too, which keeps a copy of the descriptor.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # Utterances are asked for in random order: what lies beside one is of no use.
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return {
        name: np.frombuffer(mapped, kind, count, place) if count else np.zeros(0, kind)
        for name, (kind, place, count, _) in header["columns"].items()
    }


def remove_unused(path: Path) -> bool:
    """Remove a file that nobody has mapped; whether that was possible.

    Where the file system has no locks nobody knows, and it stays.
    """
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except OSError:
        return False
    return True


def _write(file: IO[bytes], values: np.ndarray, progress: Callable[[int], None]) -> int:
    """Write the bytes of an array; their checksum."""
    data, checksum = np.ascontiguousarray(values).view(np.uint8).data, 0
    for first in range(0, len(data), _BLOCK):
        block = data[first : first + _BLOCK]
        checksum = zlib.crc32(block, checksum)
        file.write(block)
        progress(file.tell())
    return checksum


def _header(file: IO[bytes], path: Path, key: str) -> dict[str, Any]:
    try:
        header = json.loads(file.read(_HEADER))
        if header["format"] != _FORMAT or header["key"] != key:
            raise Damaged(f"{path}: is not what its name says")
        size = os.fstat(file.fileno()).st_size
        if header["size"] != size:
            raise Damaged(f"{path}: must have {header['size']} bytes, but has {size}")
        for kind, place, count, _ in header["columns"].values():
            if place < _HEADER or (count and place + count * np.dtype(kind).itemsize > size):
                raise Damaged(f"{path}: a column lies outside of it")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"{path}: its header cannot be read ({error})") from error
    return header


def _checksum(file: IO[bytes], place: int, size: int) -> int:
    # Read, not mapped: the pages of a map would count as memory of every process.
    buffer, checksum = memoryview(bytearray(min(_BLOCK, size))), 0
    file.seek(place)
    while size:
        read = file.readinto(buffer[: min(len(buffer), size)])  # type: ignore[attr-defined]
        if not read:
            break
        checksum, size = zlib.crc32(buffer[:read], checksum), size - read
    return checksum
