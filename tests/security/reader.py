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
    """Writes a valid input into a folder, and reads the input in a folder."""

    make: Callable[[Path], object]
    read: Callable[[Path], object]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines, gzipped if the name says so."""
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
