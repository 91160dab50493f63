"""Finds out how much of a truncated WAV file is missing; libsndfile does not report it."""

from __future__ import annotations

import struct
from typing import BinaryIO

_UNKNOWN = 0x7FFF_0000
"""Sizes from here on stand for "not known yet": programs that write to a pipe claim such ones."""

_CHUNKS = 1000
"""Limit of the chunks before the data of a file; intact files have fewer."""


def missing_share(file: BinaryIO, size: int) -> float:
    """Return the part of the samples that the header of a RIFF file promises and that is not there.

    The file, of ``size`` bytes, is read from its beginning.

    Returns:
        From 0 up to, not including, 1; 0 for another kind of file, or where the header leaves it
        open.
    """
    head = file.read(12)
    if len(head) < 12 or head[:4] != b"RIFF" or head[8:] != b"WAVE":
        return 0.0
    for _ in range(_CHUNKS):
        chunk = file.read(8)
        if len(chunk) < 8:
            return 0.0
        name, length = struct.unpack("<4sI", chunk)
        if name == b"data":
            there = size - file.tell()
            return 0.0 if length >= _UNKNOWN or there >= length else 1 - there / length
        file.seek(length + length % 2, 1)
    return 0.0
