"""Reads lines of text files, plain or gzipped; errors name the file and the line."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

_HALF = re.compile("[\ud800-\udfff]")


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 file with their numbers, blank ones left out, endings kept.

    A file is gzipped if its name ends in ``.gz``.

    Raises:
        ValueError: It cannot be opened, is not UTF-8, or is a damaged gzip file.
    """
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}:{number}: must be UTF-8, but has the byte {error.object[error.start]:#x}: "
            "convert the file with iconv."
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {error}.") from error


def parse_object(line: str, origin: str) -> dict[str, Any]:
    """Parse one line of a JSON-lines file.

    Raises:
        ValueError: It is not a JSON object, or a string in it is not text.
    """
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{origin}: not valid JSON ({error.msg} at column {error.colno}): "
            "write one object per line."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin}: no JSON that Python reads ({error}).") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{origin}: must be a JSON object, but is a {type(value).__name__}: "
            "write one object per line."
        )
    # An escape can spell half of a character, which is no text for a tokenizer or a file.
    if "\\u" in line and (half := _HALF.search(json.dumps(value, ensure_ascii=False))):
        raise ValueError(
            f"{origin}: must be text, but has {half.group()!a}, half of a character: remove it."
        )
    return value


def _opened(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")
