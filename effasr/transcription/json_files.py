"""Result files in JSON, either whole or absent, whenever the process is stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from effasr.data.atomic_files import write_atomically


def write_json(path: str | Path, mapping: Mapping[str, Any]) -> None:
    """Write one JSON object, indented, and its folder if need be; NaN is an error."""
    text = json.dumps(mapping, indent=2, ensure_ascii=False, allow_nan=False)
    _write(Path(path), _escaped(text) + "\n")


def write_json_lines(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line, and the folder if need be."""
    _write(Path(path), "".join(json_line(row) for row in rows))


def json_line(row: Mapping[str, Any]) -> str:
    """One JSON object and a line feed; letters of all scripts as they are.

    Bytes of a file's name that are no UTF-8, which Python has as lone surrogates, become JSON's
    escapes of these.
    """
    return _escaped(json.dumps(row, ensure_ascii=False, allow_nan=False)) + "\n"


def one_line(text: str) -> str:
    """A text, such as a file's name, without what would end a line or steer a terminal."""
    shown = (
        c if c.isprintable() or c == " " else c.encode("unicode_escape").decode() for c in text
    )
    return _escaped("".join(shown))


def _escaped(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def write_text(path: str | Path, text: str) -> None:
    """Write a text, and its folder if need be."""
    _write(Path(path), _escaped(text))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode("utf-8"))
