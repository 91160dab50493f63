"""Tables of results: CSV files that grow by a row at a time, or are written as a whole."""

from __future__ import annotations

import csv
import io
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
        if new:
            writer.writeheader()
        writer.writerow(row)


def write(path: Path, columns: Sequence[str], found: Iterable[Mapping[str, Any]]) -> None:
    """Write a table as a whole, in place of an earlier one."""
    # The GPU suite itself appends only, and runs where effasr is not installed.
    from effasr.data.atomic_files import write_atomically

    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    write_atomically(path, text.getvalue().encode())


def header(path: Path) -> list[str]:
    """Return the columns of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def read(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a file; none where there is no file."""
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            yield from csv.DictReader(file)
