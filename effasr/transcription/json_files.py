"""Result files in JSON and text, written atomically."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from effasr.data.atomic_files import write_atomically
from effasr.untrusted.display import escape_controls, escape_json, escape_line, utf8


def write_json(path: str | Path, mapping: Mapping[str, Any]) -> None:
    """Write one JSON object, indented; creates the folder. NaN is an error."""
    text = json.dumps(mapping, indent=2, ensure_ascii=False, allow_nan=False)
    _write(Path(path), _escaped(escape_json(text)) + "\n")


def write_json_lines(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    _write(Path(path), "".join(json_line(row) for row in rows))


def json_line(row: Mapping[str, Any]) -> str:
    """Return a JSON object and a line feed; lone surrogates and controls become escapes."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    return _escaped(escape_json(text)) + "\n"


def one_line(text: str) -> str:
    """Return a text, such as a file name, with line breaks and control characters escaped."""
    return _escaped(escape_line(text))


def _escaped(text: str) -> str:
    return utf8(text).decode()


def write_text(path: str | Path, text: str) -> None:
    """Write lines of text; control characters other than tabs are escaped."""
    _write(Path(path), _escaped(escape_controls(text)))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode("utf-8"))
