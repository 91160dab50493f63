"""Opens untrusted files: only regular files of limited size, in an expected folder.

Links to regular files are followed, because the Hugging Face hub cache consists of links. A pipe, a
device or a socket is refused without being opened. Links inside archives are never followed.
"""

import gzip
import io
import os
import stat
import tarfile
from pathlib import Path
from typing import BinaryIO, cast

from effasr.untrusted import remote

DOCUMENT_BYTES = 64 << 20
"""Largest size in bytes of a JSON file, a tokenizer or another small file of a model."""


def open_regular(path: str | Path, most_bytes: int | None = None) -> BinaryIO:
    """Open a regular file for reading; a ValueError for a FIFO, a device, or one of more bytes."""
    if (archive := remote.open_archive(path)) is not None:
        return archive
    remote.ensure(path)
    _check(path, os.stat(path), most_bytes)
    return io.BufferedReader(open_checked(path, most_bytes))


def open_checked(path: str | Path, most_bytes: int | None = None) -> io.FileIO:
    """Open what `os.stat` says is a regular file, unbuffered."""
    # The file may be replaced by a pipe in between; opening that would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(path, os.fstat(descriptor), most_bytes)
        return io.FileIO(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _check(path: str | Path, status: os.stat_result, most_bytes: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(f"{path} must be a file, but is a folder.")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} must be a regular file, but is a pipe, a device or a socket.")
    if most_bytes is not None and status.st_size > most_bytes:
        raise ValueError(
            f"{path} must have at most {most_bytes} bytes, but has {status.st_size}: it is not a "
            "file of this kind."
        )


def read_bytes(path: str | Path, most_bytes: int = DOCUMENT_BYTES) -> bytes:
    with open_regular(path, most_bytes) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{path} must have at most {most_bytes} bytes, but grows.")
    return content


def read_text(path: str | Path, most_bytes: int = DOCUMENT_BYTES) -> str:
    try:
        return read_bytes(path, most_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8, but is not: {error}.") from error


def plain_name(name: object, where: str) -> str:
    """A file name of a document, after checking that it has no folder part."""
    if (
        not isinstance(name, str)
        or name in ("", ".", "..")
        or any(character in name for character in "/\\\0")
    ):
        raise ValueError(
            f"{where} must be the name of a file in the same folder, but is {repr(name)[:200]}."
        )
    return name


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
        self._end = file.seek(0, os.SEEK_END)
        file.seek(0)
        self._file = file
        if unpacked_ratio is not None and head == b"\x1f\x8b":
            self._end = unpacked_ratio * self._end + unpacked_bytes
            self._file = cast(BinaryIO, gzip.GzipFile(fileobj=file))

    def __enter__(self) -> "BoundedTar":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, size: int = -1) -> bytes:
        if size > _MOST_READ:
            raise tarfile.ReadError(f"a header in it claims {size} bytes")
        remaining = max(0, self._end - self._file.tell())
        data = self._file.read(remaining + 1 if size < 0 else min(size, remaining + 1))
        if len(data) > remaining:
            raise tarfile.ReadError("it unpacks to more than a file of its size can hold")
        return data

    def seek(self, position: int) -> int:
        if position > self._end + tarfile.RECORDSIZE:
            raise tarfile.ReadError("a file in it claims to be larger than all of it")
        return self._file.seek(position)

    def tell(self) -> int:
        return self._file.tell()
