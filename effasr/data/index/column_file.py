"""Stores arrays in one checksummed file that processes map and share.

The file begins with a line of JSON, padded with spaces to `_HEADER` bytes: ``format``, ``key``,
``size`` of the file, and for each column its dtype, byte offset, length and CRC-32. Columns begin
at multiples of `_ALIGNMENT`.
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
"""Bytes that are written or checked at a time."""


class Damaged(ValueError):
    """A column file is truncated, corrupted or of another key."""


def write_columns(
    path: Path,
    key: str,
    columns: Mapping[str, np.ndarray],
    progress: Callable[[int], None] = lambda size: None,
) -> int:
    """Write a file and return its size; processes that map a replaced file keep that."""
    header: dict[str, Any] = {"format": _FORMAT, "key": key, "size": 0, "columns": {}}
    with atomic_file(path) as file:
        file.seek(_HEADER)
        for name, values in columns.items():
            offset = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
            file.seek(offset)
            header["columns"][name] = [
                values.dtype.str,
                offset,
                len(values),
                _write(file, values, progress),
            ]
        # A last column without values begins at the aligned end of the file.
        header["size"] = size = max(file.tell(), _HEADER)
        file.truncate(size)
        file.seek(0)
        file.write(json.dumps(header).encode().ljust(_HEADER - 1) + b"\n")
    return size


def map_columns(path: Path, key: str) -> dict[str, np.ndarray]:
    """Map a file into memory, read-only, after checking all of its checksums.

    While a process has it mapped, or a fork of that process, `remove_unused` does not remove it.
    """
    with path.open("rb", buffering=0) as file:
        header = _header(file, path, key)
        for name, (kind, offset, count, checksum) in header["columns"].items():
            if _checksum(file, offset, count * np.dtype(kind).itemsize) != checksum:
                raise Damaged(f"{path}: column {name!r} does not match its checksum")
        with suppress(OSError):
            # The map keeps a copy of the descriptor and with it the lock.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # Utterances are read in random order, so read-ahead is of no use.
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return {
        name: np.frombuffer(mapped, kind, count, offset) if count else np.zeros(0, kind)
        for name, (kind, offset, count, _) in header["columns"].items()
    }


def remove_unused(path: Path) -> bool:
    """Remove a file that no process has mapped, and return whether it was removed.

    Where the file system has no locks, the file is kept.
    """
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except OSError:
        return False
    return True


def _write(file: IO[bytes], values: np.ndarray, progress: Callable[[int], None]) -> int:
    """Write the bytes of an array and return their CRC-32."""
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
            raise Damaged(f"{path}: its format or key is not the expected one")
        size = os.fstat(file.fileno()).st_size
        if header["size"] != size:
            raise Damaged(f"{path}: has {size} bytes instead of {header['size']}")
        for kind, offset, count, _ in header["columns"].values():
            if offset < _HEADER or (count and offset + count * np.dtype(kind).itemsize > size):
                raise Damaged(f"{path}: a column lies outside the file")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"{path}: its header cannot be read ({error})") from error
    return header


def _checksum(file: IO[bytes], offset: int, size: int) -> int:
    # Read instead of mapped: mapped pages would count as memory of every process.
    buffer, checksum = memoryview(bytearray(min(_BLOCK, size))), 0
    file.seek(offset)
    while size:
        read = file.readinto(buffer[: min(len(buffer), size)])  # type: ignore[attr-defined]
        if not read:
            break
        checksum, size = zlib.crc32(buffer[:read], checksum), size - read
    return checksum
