"""Reads lines of text files, plain or gzipped; errors name the file and the line."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from effasr.untrusted.documents import MOST_DEPTH, is_deep
from effasr.untrusted.files import open_regular

LINE_BYTES = 32 << 20  # most bytes of a line

_UNPACKED_RATIO, _UNPACKED_BYTES = 300, 256 << 20
"""Most bytes that a byte of a gzipped file stands for, beyond the second: manifests shrink to a
tenth, gzip to a thousandth."""

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 file with their numbers, blank ones left out, endings kept.

    A file is gzipped if its name ends in ``.gz``.
    """
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(_bounded(file, path), 1):
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


def check_file(path: Path) -> None:
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or folder.")
    if not path.is_file():
        open_regular(path).close()


def parse_object(line: str, origin: str) -> dict[str, Any]:
    """Parse one line of a JSON-lines file; ``origin`` is file and line, for messages."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{origin}: not valid JSON ({error.msg} at column {error.colno}): "
            "write one object per line."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin}: no JSON that Python reads ({error}).") from error
    if line.count("[") + line.count("{") > MOST_DEPTH and is_deep(value):
        raise ValueError(f"{origin}: must be nested at most {MOST_DEPTH} deep, but is deeper.")
    if not isinstance(value, dict):
        raise ValueError(
            f"{origin}: must be a JSON object, but is a {type(value).__name__}: "
            "write one object per line."
        )
    # An escape can spell half of a character, which is no text for a tokenizer or a file.
    if "\\u" in line and (half := _HALF_CHARACTER.search(json.dumps(value, ensure_ascii=False))):
        raise ValueError(
            f"{origin}: must be text, but has {half.group()!a}, half of a character: remove it."
        )
    return value


def first_fields(path: Path) -> dict[str, Any]:
    """Return the first line of a JSON-lines file; empty for a folder and where there is none."""
    lines = numbered_lines(path) if path.is_file() else iter(())
    first = next(lines, None)
    return {} if first is None else parse_object(first[1], f"{path}:{first[0]}")


def _opened(path: Path) -> IO[bytes]:
    file = open_regular(path)
    return cast("IO[bytes]", _Unpacked(file)) if path.suffix == ".gz" else file


class _Unpacked(gzip.GzipFile):
    """A gzipped text; closes the file below it, too."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(fileobj=file, mode="rb")
        self.max_bytes = _UNPACKED_RATIO * os.fstat(file.fileno()).st_size + _UNPACKED_BYTES
        self._below = file

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._below.close()


def _bounded(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """Yield lines, each of which is checked before more than the limit is read."""
    remaining = getattr(file, "max_bytes", sys.maxsize)
    for number in itertools.count(1):
        line = file.readline(LINE_BYTES + 1)
        if not line:
            return
        remaining -= len(line)
        if len(line) > LINE_BYTES:
            raise ValueError(
                f"{path}:{number}: a line must have at most {LINE_BYTES} bytes, but has more."
            )
        if remaining < 0:
            raise ValueError(
                f"{path}: unpacks to more than {_UNPACKED_RATIO} times its size, which text does "
                "not: unpack it, if you trust it."
            )
        yield line
