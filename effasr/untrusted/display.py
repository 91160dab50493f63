"""Display on a terminal: its width, and escapes of control characters in untrusted text.

A file name or a text may contain an escape sequence that clears the screen, renames the window or
types commands, or a bidirectional override that makes it display as a different text.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import textwrap

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
    return _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


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


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


class TerminalFormatter(logging.Formatter):
    """Formats log records and escapes raw control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))
