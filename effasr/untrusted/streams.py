"""Standard streams that are closed, full or broken.

A file that is opened where a standard stream is closed takes its number, and whatever is printed
goes into that file. A terminal, a pipe or a disk behind standard error may end before a training.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any

STANDARD_OUTPUT = "standard output"
"""Name of the file in errors of writing to standard output."""


def open_standard_streams() -> None:
    """Make the standard streams usable; streams that were replaced in Python stay.

    - A closed one becomes ``/dev/null``.
    - What standard error cannot take is dropped: messages must not end a training.
    - An `OSError` of standard output names it.
    - A character that the encoding lacks becomes an escape.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is sys.__stdout__:
        interactive = sys.stdout is not None and sys.stdout.isatty()
        buffered = io.BufferedWriter(_Output(1, "w", closefd=False))
        sys.stdout = _text(buffered, sys.stdout, line_buffering=interactive)
    if sys.stderr is sys.__stderr__:
        # Without a buffer: nothing is left to be written when the interpreter ends.
        sys.stderr = _text(_Messages(2, "w", closefd=False), sys.stderr, line_buffering=True)


def discard_standard_output() -> None:
    """Send what is left for standard output to ``/dev/null``; its other end is gone, or full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _text(file: Any, before: Any, *, line_buffering: bool) -> io.TextIOWrapper:
    if before is not None:
        before.flush()
    encoding = getattr(before, "encoding", None) or "utf-8"
    return io.TextIOWrapper(
        file,
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=line_buffering,
        write_through=isinstance(file, _Messages),
    )


class _Output(io.FileIO):
    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = STANDARD_OUTPUT
            raise


class _Messages(io.FileIO):
    def write(self, data: Any) -> int:
        left = memoryview(data)
        try:
            while left:
                written = super().write(left)
                if written is None:
                    # A pipe that does not block.
                    select.select([], [self], [])
                left = left[written or 0 :]
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        return len(data)
