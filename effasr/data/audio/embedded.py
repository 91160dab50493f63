"""Audio files inside other files: a range of bytes of a tar file, or a value of a table."""

import os
import re
from dataclasses import dataclass

from effasr.data.audio.table_rows import TableRow
from effasr.untrusted.files import open_regular
from effasr.untrusted.remote import read_at

_MOST_BYTES = 4 << 30
"""Largest size of an embedded audio file, which is read as a whole; a WAV file has no more."""


@dataclass(frozen=True, slots=True)
class TarMember:
    """An audio file inside an uncompressed tar file."""

    path: str  # The tar file
    offset: int  # Byte offset of the audio file
    size: int  # Bytes of the audio file

    def __str__(self) -> str:
        return f"{self.path}[{self.offset}:{self.offset + self.size}]"

    @classmethod
    def parse(cls, text: str) -> "TarMember | None":
        """Return the inverse of ``str``; None where the text is no such place."""
        result = _TAR_MEMBER.fullmatch(text)
        return result and cls(result[1], int(result[2]), int(result[3]) - int(result[2]))

    def read(self) -> bytes:
        """Return the audio file; a place that a manifest names is checked before it is read."""
        if self.size > _MOST_BYTES:
            raise ValueError(
                f"{self}: an audio file in a tar file must have at most {_MOST_BYTES} bytes."
            )
        data = b""
        with open_regular(self.path) as file:
            if 0 < self.size <= file.seek(0, os.SEEK_END) - self.offset:
                data = read_at(file, self.offset, self.size)
        if not data or len(data) < self.size:
            raise ValueError(f"{self}: the tar file ends before.")
        return data


_TAR_MEMBER = re.compile(r"(.+)\[(\d+):(\d+)\]", re.DOTALL)

Embedded = TarMember | TableRow
"""Where an audio file inside another file is."""


def parse(text: str) -> Embedded | None:
    """Return the inverse of ``str``; None where the text is no such place."""
    return TarMember.parse(text) or TableRow.parse(text)


def to_numbers(place: Embedded) -> tuple[int, int]:
    """Return two numbers that say where in its file it is; a column is negative."""
    if isinstance(place, TarMember):
        return place.offset, place.size
    return place.row, -1 - place.column


def from_numbers(path: str, first: int, second: int) -> Embedded:
    """Return the inverse of `to_numbers`."""
    return TarMember(path, first, second) if second >= 0 else TableRow(path, first, -1 - second)
