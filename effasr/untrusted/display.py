"""Standard streams that are closed, full or broken, and escapes of control characters in texts.

A file name or a text may contain an escape sequence that clears the screen, renames the window or
types commands, or a bidirectional override that makes it display as a different text. A file that
is opened where a standard stream is closed takes its number, and whatever is printed goes into that
file. A terminal, a pipe or a disk behind standard error may end before a training.
"""

import errno
import io
import logging
import os
import re
import select
import shutil
import sys
import textwrap
from typing import Any

# C0 except line feed and tab, DEL and C1; directional marks, embeddings, overrides and isolates;
# line and paragraph separators; surrogates. Joiners are kept: Persian and Hindi need them.
BIDI_MARKS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_CONTROLS = f"\x00-\x08\x0b-\x1f\x7f-\x9f{BIDI_MARKS}\u2028\u2029\ud800-\udfff"
_ESCAPED = re.compile(f"[{_CONTROLS}]")
_ESCAPED_IN_LINE = re.compile(f"[\t\n{_CONTROLS}]")
_IN_JSON = re.compile(f"[\x7f-\x9f{BIDI_MARKS}\u2028\u2029]")


def escape_controls(text: str) -> str:
    r"""A multi-line text with control characters written as ``\x1b`` or ``\u202e``."""
    return _ESCAPED.sub(_escape, text)


def escape_line(text: str) -> str:
    """A text as one line; line feeds and tabs are escaped as well."""
    return _ESCAPED_IN_LINE.sub(_escape, text)


def escape_json(text: str) -> str:
    """A JSON document with the same value and no raw control characters."""
    return _IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def display_width() -> int | None:
    """The columns of the terminal to which standard output goes; None if it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def fold(text: str, width: int, indent: str = "  ") -> list[str]:
    """The lines of a paragraph; no word is divided, so that names and paths can be copied."""
    lines = textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines or [""]


def utf8(text: str) -> bytes:
    r"""Encode a text; bytes of a file name that are not UTF-8 become escapes such as ``\udce9``.

    Python has lone surrogates for them, and JSON has these escapes.
    """
    return text.encode("utf-8", "backslashreplace")


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


class TerminalFormatter(logging.Formatter):
    """Formats log records and escapes raw control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


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
        unwritten = memoryview(data)
        try:
            while unwritten:
                written = super().write(unwritten)
                if written is None:
                    # A pipe that does not block.
                    select.select([], [self], [])
                unwritten = unwritten[written or 0 :]
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        return len(data)
