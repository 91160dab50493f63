"""Reads lines of text files, plain or gzipped; errors name the file and the line."""

import codecs
import gzip
import io
import itertools
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from effasr.untrusted.documents import MOST_DEPTH, check_json_nodes, is_deep, unique_keys
from effasr.untrusted.files import open_regular

ARCHIVES = (".tar", ".tgz", ".parquet", ".arrow")
"""Suffixes of manifests that are no text, but audio and texts together."""

LINE_BYTES = 32 << 20  # most bytes of a line

_UNPACKED_RATIO, _UNPACKED_BYTES = 300, 256 << 20
"""Most bytes that a byte of a gzipped file stands for, beyond the second: manifests shrink to a
tenth, gzip to a thousandth."""

_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def numbered_lines(
    path: Path, errors: str = "strict", *, spaces: bool = False
) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file with their numbers, blank ones left out, endings kept.

    With ``spaces`` only empty lines are left out.

    It is UTF-8, or UTF-16 with its mark, and gzipped if its name ends in ``.gz``. With the
    ``errors`` "surrogateescape", a line that is neither is yielded, too: see `check_text`.
    """
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(_bounded(file, path), 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8", errors)
                if text.strip("\r\n" if spaces else None):
                    yield number, text
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}:{number}: {_not_utf8(error.object[error.start])}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {error}.") from error


def _not_utf8(byte: int) -> str:
    return f"must be UTF-8, but has the byte {byte:#x}: convert the file with iconv."


def check_text(line: str, origin: str) -> None:
    """Check that a line was UTF-8; see `numbered_lines`."""
    if not line.isascii() and (escaped := _ESCAPED_BYTE.search(line)) is not None:
        raise ValueError(f"{origin}: {_not_utf8(ord(escaped.group()) - 0xDC00)}")


def has_suffix(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether a name has one of these suffixes, also before ``.gz``."""
    return path.name.lower().removesuffix(".gz").endswith(suffixes)


def check_file(path: Path) -> None:
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or folder.")
    if not path.is_file():
        open_regular(path).close()


def parse_object(line: str, origin: str) -> dict[str, Any]:
    """Parse one line of a JSON-lines file; ``origin`` is file and line, for messages."""
    check_text(line, origin)
    check_json_nodes(line, origin)
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        objects = "'.[]'" if line.lstrip().startswith("[") else "."
        raise ValueError(
            f"{origin}: not valid JSON ({error.msg} at column {error.colno}): "
            f"write one object per line, as `jq -c {objects}` does."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin}: no JSON that Python reads ({error}).") from error
    if line.count("[") + line.count("{") > MOST_DEPTH and is_deep(value):
        raise ValueError(f"{origin}: must be nested at most {MOST_DEPTH} deep, but is deeper.")
    if not isinstance(value, dict):
        raise ValueError(
            f"{origin}: must be a JSON object, but is a {type(value).__name__}: "
            "write one object per line, as `jq -c '.[]'` does."
        )
    # A key has a colon, as have objects in it; most lines have no others.
    if line.count(":") > len(value):
        try:
            json.loads(line, object_pairs_hook=unique_keys)
        except ValueError as error:
            raise ValueError(f"{origin}: {error}: keep the right value.") from error
    # An escape can spell half of a character, which is no text for a tokenizer or a file.
    if "\\u" in line and (half := _HALF_CHARACTER.search(json.dumps(value, ensure_ascii=False))):
        raise ValueError(
            f"{origin}: must be text, but has {half.group()!a}, half of a character: remove it."
        )
    return value


def first_fields(path: Path) -> dict[str, Any]:
    """Return the first line of a JSON-lines file; empty for a folder and where there is none."""
    is_text = path.is_file() and not has_suffix(path, ARCHIVES)
    lines = numbered_lines(path) if is_text else iter(())
    first = next(lines, None)
    return {} if first is None else parse_object(first[1], f"{path}:{first[0]}")


def _opened(path: Path) -> IO[bytes]:
    file = open_regular(path)
    if path.suffix == ".gz":
        return cast("IO[bytes]", _Unpacked(file))
    if cast(io.BufferedReader, file).peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return cast("IO[bytes]", _Utf16(file))
    return file


class _Utf16(io.TextIOWrapper):
    """A text in UTF-16, as spreadsheets of Windows write it, whose lines are UTF-8."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, "utf-16", newline="\n")

    def readline(self, size: int = -1) -> bytes:  # type: ignore[override]
        return super().readline(size).encode()


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
