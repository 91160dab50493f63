"""Writes files atomically: a reader sees the whole old or new content."""

import errno
import os
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_HOST = f"{zlib.crc32(socket.gethostname().encode()):08x}"
"""Tells processes of several hosts apart that write to one folder."""

_OF_WRITING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}
"""Errors of a write, to which the system adds no name."""


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file's content; a reader sees the old or the new, never a part."""
    with atomic_file(path) as file:
        file.write(content)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that takes its name only when the block ends without an error.

    Raises:
        OSError: Writing fails; it names the file.
    """
    partial = path.with_name(f"{path.name}.{_HOST}.{os.getpid()}.partial")
    try:
        with naming_errors(path), partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        # A file system that has failed must not hide the first error by a second one.
        with suppress(OSError):
            partial.unlink(missing_ok=True)


@contextmanager
def naming_errors(path: Path) -> Iterator[None]:
    """Name a file or a folder in the errors of writing to it."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _OF_WRITING:
            error.filename = str(path)
        raise
