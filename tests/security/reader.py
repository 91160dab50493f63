"""What a fuzz test knows of a reader of foreign files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Reader:
    """Writes a valid input into a folder, and reads the input in a folder.

    Attributes:
        make: Writes the input.
        read: Reads it.
        slack: Resident memory that any input may take, beside twice its size and twice that of a
            valid one.
        writes: Whether reading writes into the folder.
    """

    make: Callable[[Path], object]
    read: Callable[[Path], object]
    slack: int = 16 << 20
    writes: bool = False


LINE_SLACK = 96 << 20
"""Of files of lines: a line of 32 MiB is refused after it was read, and gzip may unpack 64 MiB."""


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines, gzipped if the name says so."""
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
