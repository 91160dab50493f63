"""Sizes and checksums of files, against damage; not against somebody who changes both."""

import hashlib
import importlib.metadata
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from effasr.untrusted.files import open_regular

_CHUNK = 1 << 22
_FIELD = "checksum"


def checksum(path: Path) -> list[int]:
    """Return size in bytes and CRC-32 of a file."""
    size = value = 0
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            value = zlib.crc32(chunk, value)
    return [size, value]


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal: an identity, where a checksum is too short."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path, files: Mapping[str, Any]) -> None:
    """Compare files in a folder with the `checksum` of each by its path."""
    for name, (size, value) in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{folder} names a file elsewhere: {name!r}.")
        if path.stat().st_size != size:
            raise ValueError(f"{path} does not have its original {size} bytes.")
        if checksum(path) != [size, value]:
            raise ValueError(f"{path} does not match its checksum.")


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with a field more: ``checksum``, the CRC-32 of all others."""
    return {**content, _FIELD: _crc32(content)}


def verify_content(content: Mapping[str, Any], name: str) -> None:
    """Compare a JSON object with its checksum, if it has one: older files have none."""
    values = {key: value for key, value in content.items() if key != _FIELD}
    if _FIELD in content and content[_FIELD] != _crc32(values):
        raise ValueError(f"{name} does not match its checksum: a value of it was changed.")


def _crc32(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
