"""Reads measured rows, and formats tables and values."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "profiling")]

from bench import rows as results  # noqa: E402 (found on the path above)
from plot import newest  # noqa: E402

Row = dict[str, str]


def markdown(titles: Sequence[str], lines: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Format a table; the first ``texts`` columns are aligned to the left."""
    rule = ["---"] * texts + ["---:"] * (len(titles) - texts)
    return "".join(f"| {' | '.join(line)} |\n" for line in [titles, rule, *lines])


def read(name: str, *keys: str) -> list[Row]:
    """Read the rows of a file of results; of rows with equal keys, only the newest."""
    found = list(results.read(ROOT / "profiling/results" / f"{name}.csv"))
    if not found:
        raise ValueError(f"profiling/results/{name}.csv must have rows, but has none.")
    return [dict(row) for row in newest(found, keys)] if keys else found


def percent(share: str) -> str:
    """A share as percent, to three digits."""
    return f"{100 * float(share):.3g}" if float(share) else "0"


def tenths(share: str) -> str:
    """A share as percent, with one decimal."""
    return f"{100 * float(share):.1f}"
