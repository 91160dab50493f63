"""Reads tables and lists of durations."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DURATIONS = ("duration_seconds", "duration")
MOST_TOKENS = 2**30
"""Counts are clipped to this: no budget is as large."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a list.

    Attributes:
        line: Line number.
        name: Name of the utterance, if given.
        seconds: Duration in seconds.
        tokens: Tokens of the text, if given.
    """

    line: int
    name: str | None
    seconds: float
    tokens: int | None


def read_durations(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[Row]:
    """Read durations in seconds, one a line; ``#`` begins a comment.

    Raises:
        ValueError: A line is not a duration.
    """
    for line, text in lines:
        value = text.split("#")[0].strip()
        if value:
            yield Row(line, None, _seconds(value, f"{path}:{line}", "the line"), None)


def read_table(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[Row]:
    """Read a table separated by tabs or commas.

    The header names ``duration_seconds`` or ``duration``, and may name ``id`` and ``num_tokens``
    or a column that begins with ``n_tokens``, whose cells may be empty.

    Raises:
        ValueError: The header has no duration, or a line is malformed.
    """
    first, header = next(lines)
    delimiter = "\t" if "\t" in header else ","
    columns = [column.strip() for column in _cells(header, delimiter, f"{path}:{first}")]
    duration = next((columns.index(name) for name in _DURATIONS if name in columns), None)
    if duration is None:
        raise ValueError(
            f"{path}:{first}: must be a JSON object, a number of seconds, or a header with "
            f"`duration_seconds` or `duration`, but is {header.strip()[:60]!r}."
        )
    tokens = next((n for n, name in enumerate(columns) if _counts_tokens(name)), None)
    identity = columns.index("id") if "id" in columns else None
    for line, text in lines:
        origin = f"{path}:{line}"
        cells = _cells(text, delimiter, origin)
        if len(cells) != len(columns):
            raise ValueError(
                f"{origin}: must have {len(columns)} columns, as the header has, but has "
                f"{len(cells)}."
            )
        count = cells[tokens].strip() if tokens is not None else ""
        yield Row(
            line,
            (cells[identity] or None) if identity is not None else None,
            _seconds(cells[duration].strip(), origin, f"`{columns[duration]}`"),
            _count(count, origin, columns[tokens]) if tokens is not None and count else None,
        )


def is_number(text: str) -> bool:
    """Return whether Python parses the text as a float."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _cells(line: str, delimiter: str, origin: str) -> list[str]:
    # In tab-separated tables quotes belong to the text, as most programs write them.
    quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    try:
        return next(csv.reader([line.rstrip("\r\n")], delimiter=delimiter, quoting=quoting))
    except csv.Error as error:
        raise ValueError(f"{origin}: not a line of a table ({error}).") from error


def _counts_tokens(column: str) -> bool:
    return column == "num_tokens" or column.startswith("n_tokens")


def _count(text: str, origin: str, name: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{origin}: `{name}` must be an integer from 0 on, but is {text[:60]!r}.")
    return min(int(text), MOST_TOKENS) if len(text) < 19 else MOST_TOKENS


def _seconds(text: str, origin: str, name: str) -> float:
    value = float(text) if is_number(text) else math.nan
    if not math.isfinite(value) or value <= 0:
        raise ValueError(
            f"{origin}: {name} must be a finite number of seconds greater than 0, but is "
            f"{text[:60]!r}."
        )
    return value
