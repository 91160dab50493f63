"""Reads untrusted tar files."""

from __future__ import annotations

import gzip
import os
import tarfile
from typing import BinaryIO, cast

_MOST_READ = (64 << 20) + tarfile.BLOCKSIZE
"""Most bytes that are read at a time: small files are read as a whole."""


class BoundedTar:
    """A file for ``tarfile.open``, of which no more is read than it can honestly hold.

    tarfile reads the headers of long names at once, whatever size they claim. A gzipped file is
    unpacked only with an ``unpacked_ratio``: the most bytes that one of its bytes stands for,
    beyond ``unpacked_bytes``.
    """

    def __init__(
        self, file: BinaryIO, unpacked_ratio: int | None = None, unpacked_bytes: int = 0
    ) -> None:
        head = file.read(2)
        file.seek(0)
        self._end = os.fstat(file.fileno()).st_size
        self._file = file
        if unpacked_ratio is not None and head == b"\x1f\x8b":
            self._end = unpacked_ratio * self._end + unpacked_bytes
            self._file = cast(BinaryIO, gzip.GzipFile(fileobj=file))

    def __enter__(self) -> BoundedTar:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, size: int = -1) -> bytes:
        if size > _MOST_READ:
            raise tarfile.ReadError(f"a header in it claims {size} bytes")
        left = max(0, self._end - self._file.tell())
        data = self._file.read(left + 1 if size < 0 else min(size, left + 1))
        if len(data) > left:
            raise tarfile.ReadError("it unpacks to more than a file of its size can hold")
        return data

    def seek(self, place: int) -> int:
        if place > self._end + tarfile.RECORDSIZE:
            raise tarfile.ReadError("a file in it claims to be larger than all of it")
        return self._file.seek(place)

    def tell(self) -> int:
        return self._file.tell()
