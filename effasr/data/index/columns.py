"""Flat columns of tokens, names and audio locations for millions of utterances."""

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from lhotse.cut import Cut
from lhotse.cut.set import deserialize_cut

from effasr.data.audio.embedded import Embedded, from_numbers, to_numbers
from effasr.data.audio.waveform import AudioSegment

_BLOCK = 2**16  # arrays that are copied at a time


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Arrays of unequal length, concatenated."""

    values: np.ndarray
    offsets: np.ndarray  # int64 (n + 1,); array i is ``values[offsets[i]:offsets[i + 1]]``

    def __getitem__(self, index: int) -> np.ndarray:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> "Ragged":
        parts = [np.zeros(0, self.values.dtype), *self.blocks(rows)]
        return Ragged(np.concatenate(parts), np.concatenate([[0], np.cumsum(self.lengths[rows])]))

    def blocks(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the concatenated values of the arrays at these indices, in parts."""
        for first in range(0, len(rows), _BLOCK):
            block = rows[first : first + _BLOCK]
            begin, end = self.offsets[block], self.offsets[block + 1]
            if (begin[1:] == end[:-1]).all():
                yield self.values[begin[0] : end[-1]]
            else:
                lengths = end - begin
                shift = np.repeat(begin - (np.cumsum(lengths) - lengths), lengths)
                yield self.values[shift + np.arange(len(shift))]


class RaggedBuilder:
    """Builds a `Ragged`; the typecode is one of `array.array`."""

    def __init__(self, typecode: str = "B") -> None:
        self._values = array(typecode)
        self._lengths = array("q")

    def __len__(self) -> int:
        return len(self._lengths)

    def append(self, values: bytes | Iterable[int | float]) -> None:
        before = len(self._values)
        if isinstance(values, bytes):
            self._values.frombytes(values)
        else:
            self._values.extend(values)
        self._lengths.append(len(self._values) - before)

    def extend(self, other: "RaggedBuilder") -> None:
        self._values.extend(other._values)
        self._lengths.extend(other._lengths)

    def build(self) -> Ragged:
        """Return the arrays, which share this builder's memory: nothing can be added to it."""
        ends = np.cumsum(to_numpy(self._lengths), dtype=np.int64)
        return Ragged(to_numpy(self._values), np.concatenate([[0], ends]))


@dataclass(frozen=True, slots=True, eq=False)
class AudioColumns:
    """Names and audio locations of n rows."""

    paths: Ragged  # of the audio file, or of the tar file that holds it; empty for rows of ``cuts``
    names: Ragged
    starts: np.ndarray  # float64 (n,), start within the file in seconds
    durations: np.ndarray  # float64 (n,), seconds
    recorded: np.ndarray  # float64 (n,), seconds of the file; infinite where not known
    channels: np.ndarray  # int32 (n,), one channel, or -c for the mean of the first c channels
    member_offsets: np.ndarray  # int64 (n,), see `embedded.to_numbers`; -1 for plain files
    member_sizes: np.ndarray  # int64 (n,)
    cuts: Ragged  # JSON of the cuts whose audio only lhotse can read; empty for all other rows

    def take(self, rows: np.ndarray) -> "AudioColumns":
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, column in values.items():
            values[name] = column.take(rows) if isinstance(column, Ragged) else column[rows]
        return AudioColumns(**values)

    def name(self, row: int) -> str:
        return decode(self.names[row])

    def __getitem__(self, row: int) -> AudioSegment | Cut:
        if (cut := self.cuts[row]).size:
            return deserialize_cut(json.loads(cut.tobytes()))
        path: str | Embedded = decode(self.paths[row])
        if (offset := int(self.member_offsets[row])) >= 0:
            path = from_numbers(path, offset, int(self.member_sizes[row]))
        channel = int(self.channels[row])
        channels = (channel,) if channel >= 0 else tuple(range(-channel))
        times = (float(column[row]) for column in (self.starts, self.durations, self.recorded))
        start, duration, recorded = times
        return AudioSegment(path, start, duration, channels, recorded)


class AudioColumnsBuilder:
    def __init__(self) -> None:
        self.paths, self.names, self.cuts = RaggedBuilder(), RaggedBuilder(), RaggedBuilder()
        self.starts, self.durations, self.recorded = array("d"), array("d"), array("d")
        self.channels = array("i")
        self.member_offsets, self.member_sizes = array("q"), array("q")

    def __len__(self) -> int:
        return len(self.names)

    def append(self, cut: Cut) -> None:
        segment, content = AudioSegment.of(cut), b""
        channel = None if segment is None else _channel(segment.channels)
        if segment is None or channel is None:
            content = json_of(cut)
            segment, channel = AudioSegment("", 0.0, 0.0, (0,)), 0
        path, offset, size = segment.path, -1, 0
        if not isinstance(path, str):
            (offset, size), path = to_numbers(path), path.path
        self.paths.append(encode(path))
        self.names.append(encode(cut.id))
        self.cuts.append(content)
        self.starts.append(segment.start)
        self.durations.append(segment.duration)
        self.recorded.append(segment.recorded)
        self.channels.append(channel)
        self.member_offsets.append(offset)
        self.member_sizes.append(size)

    def extend(self, other: "AudioColumnsBuilder") -> None:
        for name, values in vars(self).items():
            values.extend(getattr(other, name))

    def build(self) -> AudioColumns:
        columns: dict[str, Any] = {
            name: values.build() if isinstance(values, RaggedBuilder) else to_numpy(values)
            for name, values in vars(self).items()
        }
        return AudioColumns(**columns)


def _channel(channels: tuple[int, ...]) -> int | None:
    """Encode channels as in `AudioColumns.channels`; None if no single number can express them."""
    if len(channels) == 1:
        return channels[0]
    return -len(channels) if channels == tuple(range(len(channels))) else None


def to_numpy(values: array) -> np.ndarray:
    """Return a numpy array that shares the memory of an `array.array`, which can no longer grow."""
    return np.frombuffer(values, values.typecode) if values else np.zeros(0, values.typecode)


def json_of(cut: Cut) -> bytes:
    """Return a cut as JSON, which `json.loads` reads; file names need not be UTF-8."""
    return json.dumps(cut.to_dict(), ensure_ascii=False).encode("utf-8", "surrogatepass")


def encode(text: str) -> bytes:
    """Encode as UTF-8; bytes of a file name that are not UTF-8 are kept, as `os.fsencode` does."""
    return text.encode("utf-8", "surrogateescape")


def decode(data: np.ndarray) -> str:
    """Decode uint8 (n,), the inverse of `encode`."""
    return data.tobytes().decode("utf-8", "surrogateescape")
