"""Lengths of millions of utterances in one file that processes map and share.

The file begins with a line of JSON, filled up to `_HEADER` bytes with spaces: ``format``, the
number of utterances, and a fingerprint. Then come the frames (int32), the tokens (int32) and the
sources (uint16) of all utterances, little-endian.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from effasr.data.files import atomic_file
from effasr.data.sampling.plan import UtteranceLengths

_FORMAT = "effasr length index 1"
_HEADER = 256
_COLUMNS = {"frames": "<i4", "tokens": "<i4", "source": "<u2"}


@dataclass(frozen=True, slots=True, eq=False)
class LengthIndex:
    """Lengths and sources of utterances, read from a file that stays where it is.

    Attributes:
        lengths: Encoder frames and decoder tokens.
        source: uint16 (n,), the number of each utterance's source.
        fingerprint: SHA-256 of all values; plans from indices with the same one are the same.
    """

    lengths: UtteranceLengths
    source: np.ndarray
    fingerprint: str

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def write(path: str | Path, lengths: UtteranceLengths, source: np.ndarray | None = None) -> str:
        """Write a file, in place of one that may be there; readers of that one keep it.

        Args:
            path: Of the file.
            lengths: Encoder frames and decoder tokens.
            source: uint16 (n,), the number of each utterance's source; by default 0.

        Returns:
            The fingerprint.

        Raises:
            ValueError: ``source`` is not one number for each utterance.
        """
        count = len(lengths)
        if source is None:
            source = np.zeros(count, np.uint16)
        if source.dtype != np.uint16 or source.shape != (count,):
            raise ValueError(
                f"`source` must be uint16 ({count},), but is {source.dtype} {source.shape}."
            )
        columns = {"frames": lengths.frames, "tokens": lengths.tokens, "source": source}
        stored = [np.ascontiguousarray(columns[name], kind) for name, kind in _COLUMNS.items()]
        fingerprint = _fingerprint(stored)
        header = {"format": _FORMAT, "utterances": count, "fingerprint": fingerprint}
        with atomic_file(Path(path)) as file:
            file.write(json.dumps(header).encode().ljust(_HEADER - 1) + b"\n")
            for column in stored:
                file.write(column.data)
        return fingerprint

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = False) -> Self:
        """Map a file into memory; only what is looked at is read.

        Args:
            path: Of the file.
            verify: Whether all is read to check the fingerprint.

        Raises:
            ValueError: The file is not such an index, is cut short, or is damaged.
            OSError: It cannot be read.
        """
        header = _header(path)
        count = header["utterances"]
        size = _HEADER + count * sum(np.dtype(kind).itemsize for kind in _COLUMNS.values())
        if os.path.getsize(path) != size:
            raise ValueError(
                f"{path}: an index of {count} utterances must have {size} bytes, but has "
                f"{os.path.getsize(path)}: write it again."
            )
        columns, begin = [], _HEADER
        for kind in _COLUMNS.values():
            columns.append(_mapped(path, kind, begin, count))
            begin += columns[-1].nbytes
        if verify and _fingerprint(columns) != header["fingerprint"]:
            raise ValueError(f"{path}: the values do not have their fingerprint: write it again.")
        frames, tokens, source = columns
        return cls(UtteranceLengths(frames, tokens), source, header["fingerprint"])


def _header(path: str | Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        line = file.read(_HEADER)
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ValueError(
            f"{path}: must begin as '{_FORMAT}' does, but does not: give a file that "
            "LengthIndex.write wrote."
        )
    return header


def _mapped(path: str | Path, kind: str, begin: int, count: int) -> np.ndarray:
    if not count:
        return np.zeros(0, kind)
    # A plain array: numpy's memmap would travel through every result.
    return np.asarray(np.memmap(path, kind, "r", offset=begin, shape=(count,)))


def _fingerprint(columns: list[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for column in columns:
        digest.update(column.data)
    return digest.hexdigest()
