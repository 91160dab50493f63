"""Tables of results: CSV files that grow by a row at a time, or are written as a whole."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def append(path: Path, columns: Sequence[str], row: Mapping[str, Any]) -> None:
    """Write a row, and first the header where the file does not exist.

    Raises:
        ValueError: The file has other columns.
    """
    new = not path.exists() or not path.stat().st_size
    if new:
        path.parent.mkdir(parents=True, exist_ok=True)
    elif (found := header(path)) != list(columns):
        other = ", ".join(sorted(set(found) ^ set(columns))) or "their order"
        raise ValueError(
            f"{path} must have the columns of this version to be appended to, but differs in "
            f"{other}: name another file, or move this one away."
        )
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if not new and not _ends_a_line(path):
            file.write("\n")  # a full disk has cut the last row, to which this one would be added
        if new:
            writer.writeheader()
        writer.writerow(_as_cells(row))


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def write(path: Path, columns: Sequence[str], found: Iterable[Mapping[str, Any]]) -> None:
    """Write a table as a whole, in place of an earlier one."""
    # The GPU suite itself appends only, and runs where effasr is not installed.
    from effasr.data.atomic_files import write_atomically

    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_as_cells, found))
    write_atomically(path, text.getvalue().encode())


def header(path: Path) -> list[str]:
    """Return the columns of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def read(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a file; none where there is no file."""
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                yield {name: _original(value) for name, value in row.items()}


_FORMULA = ("=", "+", "-", "@", "\t")
"""Beginnings of a text that a spreadsheet may take for a formula."""


def _as_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose texts, such as names of runs, are no formulas and stay in their cells."""
    return {name: _cell(value) for name, value in row.items()}


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    # csv does not quote a carriage return, which ends the row for some readers.
    text = value.replace("\r", " ")
    is_formula = text.lstrip("'").startswith(_FORMULA) and not _is_number(text)
    return f"'{text}" if is_formula else text


def _original(cell: Any) -> Any:
    is_quoted = isinstance(cell, str) and cell.startswith("'")
    return cell[1:] if is_quoted and cell.lstrip("'").startswith(_FORMULA) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
