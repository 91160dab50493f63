"""How much audio a file holds, where libsndfile does not find out.

libsndfile believes the first header of a file. That is wrong for MP3 whose header has no length or
a wrong one, for files that were joined (``cat a.ogg b.ogg``), and for headers that promise less or
more than follows, as a recorder leaves them when it dies. `examine` walks the containers without
decoding, and returns the views of the bytes that libsndfile has to decode one after the other, and
what is missing.
"""

from __future__ import annotations

import io
import os
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import BinaryIO, TypeAlias

import numpy as np

# A range of the file, or bytes that stand in the place of some of it.
Piece: TypeAlias = "range | bytes"

_BLOCK = 1 << 20
_MAX_CHUNKS = 1000  # before the audio; intact files have fewer
# Sizes from here on stand for "not known yet": programs that write to a pipe claim such ones.
_UNKNOWN_SIZE = 0x7FFF_0000


@dataclass(frozen=True, slots=True)
class Layout:
    """What of a file is to be decoded, and what its headers promise besides."""

    # Views of the file, each a whole file to libsndfile; none: the file as it is.
    parts: tuple[tuple[Piece, ...], ...] = ()
    missing: float = 0.0  # share of the promised audio that the file lacks
    missing_s: float = 0.0  # the same in seconds, where the container has only that
    following: int = 0  # bytes behind the audio that no header accounts for
    mpeg: MpegFrames | None = None


@dataclass(frozen=True, slots=True)
class MpegFrames:
    """Where the frames of an MP3 file are, so that decoding may begin at any of them."""

    starts: array[int]
    lengths: array[int]
    samples: int  # of each frame
    delay: int  # samples that the encoder says it has put before the audio
    head: bytes  # of a frame

    def view(self) -> tuple[Piece, ...]:
        """Return the file with a header of its length."""
        ranges = self._ranges(0)
        return (_xing(self.head, len(self.starts), sum(map(len, ranges))), *ranges)

    def view_before(self, file: BinaryIO, number: int) -> tuple[int, tuple[Piece, ...]]:
        """Return a view that decodes a frame as the whole file does, and the first frame in it.

        A frame has some of its bits in the frames before it, up to 511 bytes. Those frames come
        first, but empty: the decoder would write to the terminal about what they lack themselves.
        The transform, and the filter bank, reach back by a frame each.
        """
        first = full = max(0, number - 3)
        held = 0
        while first > 0 and held < 511:
            first -= 1
            held += self.lengths[first] - 38
        empty, held = [], 0
        for start, length in zip(self.starts[first:full], self.lengths[first:full], strict=True):
            file.seek(start)
            content, bits = _without_sound(file.read(length), held)
            empty.append(content)
            held += bits
        pieces = (*empty, *self._ranges(full))
        header = _xing(self.head, len(self.starts) - first, sum(map(len, pieces)))
        return first, (header, *pieces)

    def _ranges(self, number: int) -> list[range]:
        ranges: list[range] = []
        for start, length in zip(self.starts[number:], self.lengths[number:], strict=True):
            if ranges and ranges[-1].stop == start:
                ranges[-1] = range(ranges[-1].start, start + length)
            else:
                ranges.append(range(start, start + length))
        return ranges


class Bytes:
    """The bytes of a file or of an object in memory, read in blocks."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = file.seek(0, os.SEEK_END)
        self._start, self._block = 0, b""

    def at(self, offset: int, count: int) -> bytes:
        """Return up to ``count`` bytes from an offset; fewer at the end of the file."""
        if not 0 <= offset < self.size:
            return b""
        begin = offset - self._start
        if begin < 0 or begin + count > len(self._block):
            self._file.seek(offset)
            # A first look at a header needs no more than a page.
            least = 1 << 16 if self._block else 1 << 12
            self._start, self._block = offset, self._file.read(max(count, least))
            begin = 0
        return self._block[begin : begin + count]

    def find(self, pattern: bytes, start: int) -> int:
        """Return where a pattern begins, at ``start`` or later; -1 where it does not come."""
        while start + len(pattern) <= self.size:
            block = self.at(start, _BLOCK)
            position = block.find(pattern)
            if position >= 0:
                return start + position
            if len(block) <= len(pattern):
                return -1
            start += len(block) - len(pattern) + 1
        return -1


class View(io.RawIOBase):
    """Pieces of a file as a file of their own."""

    def __init__(self, file: BinaryIO, pieces: Sequence[Piece]) -> None:
        self._file, self._pieces = file, pieces
        self._ends = list(accumulate(len(piece) for piece in pieces))
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._ends[-1]}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        target, count = memoryview(buffer).cast("B"), 0
        while count < len(target) and self._position < self._ends[-1]:
            number = bisect_right(self._ends, self._position)
            piece = self._pieces[number]
            inside = self._position - (self._ends[number] - len(piece))
            length = min(len(piece) - inside, len(target) - count)
            if isinstance(piece, bytes):
                data = piece[inside : inside + length]
            else:
                self._file.seek(piece.start + inside)
                data = self._file.read(length)
                if not data:  # the file became shorter meanwhile
                    break
            target[count : count + len(data)] = data
            count += len(data)
            self._position += len(data)
        return count


def examine(file: BinaryIO, *, thorough: bool = True) -> Layout:
    """Walk the containers of a file.

    Not ``thorough``: FLAC is not searched for a second file behind the first, for which all of its
    bytes would have to be read.
    """
    data = Bytes(file)
    try:
        start = _skip_id3(data, 0)
        head = data.at(start, 40)
        if head.startswith(b"OggS"):
            return _ogg(data, start)
        if head.startswith(b"fLaC"):
            return _flac(data, start, thorough=thorough)
        if head[:4] in (b"RIFF", b"RF64", b"BW64") and head[8:12] == b"WAVE":
            return _wave(data) if start == 0 else _behind(data, start, _wave)
        if start == 0:
            if head[:16] == _W64_RIFF and head[24:40] == _W64_WAVE:
                return _w64(data)
            if head.startswith(b"FORM") and head[8:12] in (b"AIFF", b"AIFC"):
                return _aiff(data)
            if head.startswith(b".snd"):
                start, claimed = struct.unpack(">II", data.at(4, 8))
                unknown = claimed == 0xFFFF_FFFF
                return _claimed(data, start, claimed, unknown=unknown, to_end=((8, b"\xff" * 4),))
            if head.startswith(b"NIST_1A"):
                return _sphere(data)
            if head.startswith(b"caff"):
                return _caf(data)
        return _mpeg(data, start)
    except (struct.error, IndexError):  # a header ends early: libsndfile says so
        return Layout()


# RIFF, RF64, W64, AIFF, AU, SPHERE, CAF: a header has the size of the audio.


def _claimed(
    data: Bytes, start: int, claimed: int, *, unknown: bool, to_end: tuple[tuple[int, bytes], ...]
) -> Layout:
    """Return the layout of audio that begins at ``start`` and has ``claimed`` bytes, it is said.

    ``to_end`` has the offsets and bytes that make a header say that the audio goes on to the end.
    """
    there = data.size - start
    if unknown or there <= 0:
        return Layout()
    if claimed > there:
        return Layout(missing=1 - there / claimed)
    if claimed == 0:
        return Layout((_patched(data.size, to_end),))
    return Layout(following=there - claimed)


def _patched(size: int, patches: tuple[tuple[int, bytes], ...]) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    position = 0
    for offset, replacement in sorted(patches):
        pieces += [range(position, offset), replacement]
        position = offset + len(replacement)
    return tuple(piece for piece in (*pieces, range(position, size)) if len(piece))


def _chunks(
    data: Bytes, start: int, head: str = "<4sI", align: int = 2, *, with_head: bool = False
) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, start and length of each chunk; ``with_head``: lengths count their heads."""
    size = struct.calcsize(head)
    for _ in range(_MAX_CHUNKS):
        content = data.at(start, size)
        if len(content) < size:
            return
        name, length = struct.unpack(head, content)
        start += size
        yield name[:4], start, length - size * with_head
        length = max(0, length - size * with_head)
        start += length + -length % align


def _without_chunks(data: Bytes, layout: Layout, end: int, head: int = 4) -> Layout:
    """The layout of a file, where its audio ends; what follows may be chunks, with names."""
    tail = data.at(end, head)
    is_chunk = len(tail) < head or all(32 <= byte < 127 for byte in tail[:4])
    return Layout() if layout.following and is_chunk else layout


def _is_chunk(data: Bytes, start: int) -> bool:
    """Return whether a chunk of RIFF may begin here: four printable characters and a size."""
    head = data.at(start, 8)
    if len(head) < 8:
        return True
    return all(32 <= byte < 127 for byte in head[:4]) and (
        struct.unpack("<I", head[4:])[0] <= data.size - start - 8
    )


def _wave(data: Bytes) -> Layout:
    large: int | None = None  # RF64 has the size of the audio in a chunk before it
    large_at = 0
    coding = b""
    for name, start, length in _chunks(data, 12):
        if name == b"fmt ":
            coding = data.at(start, min(length, 40))
        if name == b"ds64":
            large, large_at = struct.unpack("<Q", data.at(start + 8, 8))[0], start + 8
        if name != b"data":
            continue
        end = start + length + length % 2
        if large is not None and length >= _UNKNOWN_SIZE:
            size = struct.pack("<Q", data.size - start)
            unknown = large >= 1 << 62
            return _claimed(data, start, large, unknown=unknown, to_end=((large_at, size),))
        if length < _UNKNOWN_SIZE and data.at(end, 4) == b"RIFF" and data.at(end + 8, 4) == b"WAVE":
            # The file ends here, where another one of the kind begins.
            layout = _behind(data, end, _wave)
            return replace(layout, parts=((range(end),), *layout.parts))
        if length == 0 and start < data.size and _is_chunk(data, start):
            return Layout()
        size = min(data.size - start, 0xFFFF_FFFE)
        fields = ((4, min(data.size - 8, 0xFFFF_FFFE)), (start - 4, size))
        to_end = tuple((offset, struct.pack("<I", value)) for offset, value in fields)
        layout = _claimed(data, start, length, unknown=length >= _UNKNOWN_SIZE, to_end=to_end)
        if layout.following and (_is_chunk(data, end) or _tag_length(data, end)):
            return Layout()
        if layout.following and _goes_on(data, start + length, coding, length):
            return Layout((_patched(data.size, to_end),))
        return layout
    return Layout()


def _goes_on(data: Bytes, start: int, coding: bytes, length: int) -> bool:
    """Return whether PCM goes on behind its end, as a recorder leaves it that dies.

    Such a recorder brings the header up to date now and then. Whole samples follow, up to the end
    of the file; those of something else, such as another file, would be as loud as white noise.
    """
    tag, _, _, rate, frame, bits = struct.unpack("<HHIIHH", coding[:16])
    if tag == 0xFFFE:  # the subformat follows
        tag = int.from_bytes(coding[24:26], "little")
    width = bits // 8
    if tag != 1 or width not in (2, 3, 4) or frame == 0:
        return False
    following = data.size - start
    # Fewer bytes than those of a tenth of a second are padding.
    if length % frame or following % frame or following <= 0.1 * rate:
        return False
    for at in (start, max(start, data.size - _BLOCK // frame * frame)):
        content = data.at(at, min(_BLOCK // frame * frame, data.size - at))
        highest = np.frombuffer(content, np.int8)[width - 1 :: width]
        if np.mean(np.square(highest, dtype=np.float32)) > (128 * _LOUDEST_SPEECH) ** 2:
            return False
    return True


_LOUDEST_SPEECH = 0.4  # of full scale: white noise has 0.58, text in ASCII more


def _behind(data: Bytes, start: int, walk: Callable[[Bytes], Layout]) -> Layout:
    """Return the layout of a file that begins at an offset of another."""
    remainder = _Shifted(data, start)
    layout = walk(remainder)
    parts = tuple(
        tuple(
            piece if isinstance(piece, bytes) else range(piece.start + start, piece.stop + start)
            for piece in part
        )
        for part in layout.parts or ((range(remainder.size),),)
    )
    return replace(layout, parts=parts)


class _Shifted(Bytes):
    """A file from an offset on."""

    def __init__(self, data: Bytes, offset: int) -> None:
        self._data, self._offset, self.size = data, offset, data.size - offset

    def at(self, offset: int, count: int) -> bytes:
        return self._data.at(offset + self._offset, count)


_W64_RIFF = b"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\x00\x00"
_W64_WAVE = b"wave\xf3\xac\xd3\x11\x8c\xd1\x00\xc0\x4f\x8e\xdb\x8a"


def _w64(data: Bytes) -> Layout:
    for name, start, length in _chunks(data, 40, "<16sQ", 8, with_head=True):
        if name == b"data":
            size = struct.pack("<Q", data.size - start + 24)
            to_end = ((16, struct.pack("<Q", data.size)), (start - 8, size))
            claimed, unknown = max(0, length), length >= (1 << 62) - 24
            layout = _claimed(data, start, claimed, unknown=unknown, to_end=to_end)
            return _without_chunks(data, layout, start + claimed + -claimed % 8, 24)
    return Layout()


def _aiff(data: Bytes) -> Layout:
    frames_at, frame_bytes = 0, 0
    for name, start, length in _chunks(data, 12, ">4sI"):
        if name == b"COMM":
            channels, _, bits = struct.unpack(">hIh", data.at(start, 8))
            frames_at, frame_bytes = start + 2, channels * ((bits + 7) // 8)
        if name == b"SSND":
            begin, claimed = start + 8, max(0, length - 8)
            size = data.size - start
            fields = [(4, data.size - 8), (start - 4, size)]
            if frames_at and frame_bytes > 0:
                fields.append((frames_at, (size - 8) // frame_bytes))
            to_end = tuple((at, struct.pack(">I", min(value, 2**32 - 1))) for at, value in fields)
            layout = _claimed(data, begin, claimed, unknown=length == 2**32 - 1, to_end=to_end)
            return _without_chunks(data, layout, start + length + length % 2)
    return Layout()


def _sphere(data: Bytes) -> Layout:
    """NIST's SPHERE: a header of lines, such as ``sample_count -i 16000``."""
    lines = data.at(0, 1024).split(b"\n")
    fields, is_packed = {}, False
    for line in lines[2:]:
        words = line.split(None, 2)
        if words[:1] == [b"end_head"]:
            break
        # libsndfile writes the bytes of a sample as text: -s1 1.
        if len(words) == 3 and words[2].strip().isdigit():
            fields[words[0]] = int(words[2])
        is_packed |= words[:1] == [b"sample_coding"] and b"," in line  # pcm,embedded-shorten-v2.00
    if not lines[1].strip().isdigit() or b"sample_count" not in fields or is_packed:
        return Layout()
    width = fields.get(b"channel_count", 1) * fields.get(b"sample_n_bytes", 2)
    claimed = fields[b"sample_count"] * width
    if not claimed:
        return Layout(following=max(0, data.size - int(lines[1])))
    return _claimed(data, int(lines[1]), claimed, unknown=False, to_end=())


def _caf(data: Bytes) -> Layout:
    for name, start, length in _chunks(data, 8, ">4sq", 1):
        if name == b"data":
            # Four bytes of an edit count come before the samples.
            to_end = ((start - 8, struct.pack(">q", data.size - start)),)
            claimed = max(0, length - 4)
            layout = _claimed(data, start + 4, claimed, unknown=length < 0, to_end=to_end)
            return _without_chunks(data, layout, start + max(0, length))
    return Layout()


# FLAC and Ogg: a second file behind the first is legal, in Ogg by its specification.


def _flac(data: Bytes, start: int, *, thorough: bool) -> Layout:
    if not int.from_bytes(data.at(start + 21, 5), "big") & 0xF_FFFF_FFFF:
        return _flac_with_length(data, start)
    if not thorough:
        return Layout()
    starts, position = [start], start + 4
    while (position := data.find(b"fLaC", position)) >= 0:
        # The head of the first block: STREAMINFO of 34 bytes, perhaps the last block.
        if data.at(position + 4, 4) in (b"\x00\x00\x00\x22", b"\x80\x00\x00\x22"):
            starts.append(position)
        position += 4
    if len(starts) == 1:
        return Layout()
    ends = [*starts[1:], data.size]
    return Layout(tuple((range(a, b),) for a, b in zip(starts, ends, strict=True)))


def _flac_with_length(data: Bytes, start: int) -> Layout:
    """Give FLAC that was written to a pipe the number of samples that its header lacks.

    Its last frame has the number of its first sample, or of the frame, and how many follow.
    """
    usual = struct.unpack(">H", data.at(start + 8, 2))[0]
    begin = max(start, data.size - _MAX_FLAC_FRAME)
    end = data.at(begin, data.size - begin)
    position = len(end)
    while (position := end.rfind(b"\xff", 0, position)) >= 0:
        last = _flac_frame(end[position:], usual)
        if last is not None:
            # 36 bits of STREAMINFO, of which four share a byte with the sample size.
            high = bytes([(data.at(start + 21, 1)[0] & 0xF0) | last >> 32 & 0x0F])
            length = high + struct.pack(">I", last & 0xFFFF_FFFF)
            return Layout((_patched(data.size, ((start + 21, length),)),))
    return Layout()


_MAX_FLAC_FRAME = 1 << 20  # bytes: 65,535 samples of eight channels of 16 bits


def _flac_frame(frame: bytes, usual: int) -> int | None:
    """Return the samples up to the end of a frame; None unless all bytes are one frame."""
    if len(frame) < 9 or frame[1] & 0xFE != 0xF8:
        return None
    size, rate = frame[2] >> 4, frame[2] & 0x0F
    number, width = frame[4], 1
    if number >= 0xC0:  # as in UTF-8, of up to seven bytes
        width = 8 - (number ^ 0xFF).bit_length()
        number &= 0x7F >> width
        for byte in frame[5 : 4 + width]:
            number = number << 6 | byte & 0x3F
    at = 4 + width
    samples = 192 if size == 1 else 144 << size if 2 <= size <= 5 else 1 << size if size >= 8 else 0
    if size in (6, 7):
        samples = int.from_bytes(frame[at : at + size - 5], "big") + 1
        at += size - 5
    at += {12: 1, 13: 2, 14: 2}.get(rate, 0)
    if not samples or frame[at : at + 1] != bytes([_crc(frame[:at], 8, 0x07)]):
        return None
    if _crc(frame[:-2], 16, 0x8005) != int.from_bytes(frame[-2:], "big"):
        return None
    is_variable = frame[1] & 1
    return (number if is_variable else number * usual) + samples


def _ogg(data: Bytes, start: int) -> Layout:
    """Divide a file into the links of its chain, each of which begins with first pages."""
    links: list[int] = []
    position = last_page = start
    last_end = start
    is_first = is_last = is_cut = False
    while len(head := data.at(position, 27)) == 27:
        if not head.startswith(b"OggS"):
            position = data.find(b"OggS", position)
            if position < 0:
                break
            continue
        flags, segments = head[5], head[26]
        table = data.at(position + 27, segments)
        end = position + 27 + segments + sum(table)
        if end > data.size or len(table) < segments:
            is_cut = True
            break
        if flags & 2 and not is_first:
            links.append(position)
        is_first, is_last, last_page = bool(flags & 2), bool(flags & 4), position
        position, last_end = end, end
    if not links or (len(links) == 1 and is_last and not is_cut and not start):
        return Layout()
    ends = [*links[1:], last_end]
    parts: list[tuple[Piece, ...]] = [(range(a, b),) for a, b in zip(links, ends, strict=True)]
    if not is_last:
        # libsndfile fails at the end of a stream whose last page does not say that it is the last.
        parts[-1] = _with_last_page(data, links[-1], last_page, last_end)
    # How much is missing after half a page, nobody knows.
    return Layout(tuple(parts), missing_s=float("inf") if is_cut else 0.0)


def _with_last_page(data: Bytes, start: int, page: int, end: int) -> tuple[Piece, ...]:
    content = bytearray(data.at(page, end - page))
    content[5] |= 4
    content[22:26] = bytes(4)
    content[22:26] = struct.pack("<I", _crc(content, 32, 0x04C1_1DB7))
    return tuple(piece for piece in (range(start, page), bytes(content)) if len(piece))


def _crc(data: bytes | bytearray, bits: int, polynomial: int, initial: int = 0) -> int:
    """Return a checksum, most significant bit first, as FLAC, Ogg and MPEG audio have it."""
    mask, table = (1 << bits) - 1, _crc_table(bits, polynomial)
    checksum = initial
    for byte in data:
        checksum = (checksum << 8 & mask) ^ table[checksum >> bits - 8 ^ byte]
    return checksum


@cache
def _crc_table(bits: int, polynomial: int) -> tuple[int, ...]:
    table = []
    for number in range(256):
        value = number << bits - 8
        for _ in range(8):
            value = value << 1 ^ (polynomial if value >> bits - 1 & 1 else 0)
        table.append(value & (1 << bits) - 1)
    return tuple(table)


# MPEG audio: frames after frames, with tags before, between and behind them.

_BITRATES = {  # kbit/s by (version 1, layer)
    (True, 1): (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}


@dataclass(frozen=True, slots=True)
class _Frame:
    """The header of a frame of MPEG audio."""

    version: int  # 3: MPEG 1, 2: MPEG 2, 0: MPEG 2.5
    layer: int
    rate: int
    length: int  # bytes
    samples: int
    mono: bool

    @property
    def info_at(self) -> int:
        """Offset of a Xing or Info header: behind the side information of layer III."""
        if self.version == 3:
            return 4 + (17 if self.mono else 32)
        return 4 + (9 if self.mono else 17)


def _frame(head: bytes) -> _Frame | None:
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return None
    version, layer = head[1] >> 3 & 3, 4 - (head[1] >> 1 & 3)
    bitrate, rate = head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or layer == 4 or bitrate in (0, 15) or rate == 3:
        return None
    hertz = _RATES[version][rate]
    bits = 1000 * _BITRATES[version == 3, layer][bitrate]
    padding = head[2] >> 1 & 1
    samples = 384 if layer == 1 else 576 if layer == 3 and version != 3 else 1152
    length = (
        (12 * bits // hertz + padding) * 4 if layer == 1 else samples // 8 * bits // hertz + padding
    )
    return _Frame(version, layer, hertz, length, samples, head[3] >> 6 == 3)


def _skip_id3(data: Bytes, start: int) -> int:
    while (head := data.at(start, 10)).startswith(b"ID3") and len(head) == 10:
        size = head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9]
        start += 10 + size + (10 if head[5] & 0x10 else 0)
    return start


def _tag_length(data: Bytes, start: int) -> int:
    """Return the bytes of a tag at an offset; 0 where there is none."""
    head = data.at(start, 32)
    if head.startswith(b"ID3"):
        return _skip_id3(data, start) - start
    if head.startswith(b"TAG"):
        return min(128, data.size - start)
    if head.startswith(b"APETAGEX") and len(head) == 32:
        size, _, flags = struct.unpack("<III", head[12:24])
        return size + 32 if flags & 0x2000_0000 else 32
    if head.startswith(b"LYRICSBEGIN"):
        end = data.find(b"LYRICS200", start)
        return end + 9 - start if end >= 0 else 0
    return 0


def _mpeg(data: Bytes, start: int) -> Layout:
    """Count the frames of MPEG audio; where the header says otherwise, give it another header."""
    first: _Frame | None = None
    stated, stated_bytes, delay, info_frame = None, None, 0, b""  # of the first part
    starts, lengths = array("q"), array("q")
    position = start
    while position + 4 <= data.size:
        frame = _frame(data.at(position, 4))
        if frame is not None and first is not None and not _alike(frame, first):
            frame = None
        in_sync = bool(starts) and starts[-1] + lengths[-1] == position
        if frame is None or not (in_sync or _is_followed(data, position, frame)):
            if first is None and position - start > 1 << 16:
                return Layout(((range(start, data.size),),))
            length = _tag_length(data, position)
            position = position + length if length else _next_sync(data, position + 1)
            continue
        if position + frame.length > data.size:
            break
        first = first or frame
        header = data.at(position, frame.length)
        info = header[frame.info_at :] if frame.layer == 3 else b""
        if info.startswith((b"Xing", b"Info")) or header[36:40] == b"VBRI":
            if not starts:
                stated, stated_bytes, delay = _stated(header, info)
                info_frame = header
        else:
            starts.append(position)
            lengths.append(frame.length)
        position += frame.length
    if first is None or not starts:
        # By a view, libsndfile does not know the name: of no file that is called .mp3 it believes
        # that it is one, and mpg123 would write to the terminal about what it is not.
        return Layout(((range(start, data.size),),))
    # Only layer III has a header for the length, but files of the others have a constant bit rate.
    if first.layer != 3:
        return Layout()
    count, size = len(starts), sum(lengths)
    missing = max(0, (stated or 0) - count - 1) * first.samples / first.rate
    frames = MpegFrames(starts, lengths, first.samples, delay, data.at(starts[0], 4))
    is_one = starts[-1] + lengths[-1] == starts[0] + size
    if is_one and stated is not None and abs(stated - count) <= 1:
        # mpg123 writes to the terminal where tags make a file a percent longer than it is said.
        if stated_bytes is None or abs(stated_bytes - data.size) <= 0.005 * data.size:
            return Layout(mpeg=frames)
        if stated_bytes:
            at = first.info_at + 8 + 4 * (info_frame[first.info_at + 7] & 1)
            total = struct.pack(">I", len(info_frame) + size)
            info_frame = info_frame[:at] + total + info_frame[at + 4 :]
            return Layout(((info_frame, range(starts[0], starts[0] + size)),), mpeg=frames)
    return Layout((frames.view(),), missing_s=missing, mpeg=frames)


def _alike(frame: _Frame, other: _Frame) -> bool:
    return (frame.version, frame.layer, frame.rate) == (other.version, other.layer, other.rate)


def _is_followed(data: Bytes, position: int, frame: _Frame) -> bool:
    """Return whether another frame, a tag or the end of the file comes behind a frame."""
    end = position + frame.length
    if end + 4 > data.size:
        return end <= data.size
    following = _frame(data.at(end, 4))
    return (following is not None and _alike(frame, following)) or _tag_length(data, end) > 0


def _next_sync(data: Bytes, position: int) -> int:
    """Return where a frame or a tag may begin next."""
    while position < data.size:
        block = data.at(position, 1 << 16)
        marks = [block.find(mark) for mark in (b"\xff", b"ID3", b"TAG", b"APETAGEX")]
        begins = [mark for mark in marks if mark >= 0]
        if begins:
            return position + min(begins)
        if len(block) < 8:
            break
        position += len(block) - 7
    return data.size


def _stated(header: bytes, info: bytes) -> tuple[int | None, int | None, int]:
    """Return frames and bytes of a Xing, Info or VBRI header, where it has them, and the delay."""
    if header[36:40] == b"VBRI":
        # libsndfile knows no VBRI: by the bytes, the header is replaced in any case.
        return (struct.unpack(">I", header[50:54])[0] if len(header) >= 54 else None), 0, 0
    flags = int.from_bytes(info[4:8], "big")
    fields, offset = [], 8
    for bit in (1, 2):
        has_field = flags & bit and len(info) >= offset + 4
        fields.append(int.from_bytes(info[offset : offset + 4], "big") if has_field else None)
        offset += 4 if has_field else 0
    # LAME's extension; its fields lie behind the table and the quality that Xing has.
    delay = int.from_bytes(info[141:143], "big") >> 4 if len(info) >= 144 else 0
    return fields[0], fields[1], delay


def _xing(head: bytes, frames: int, size: int) -> bytes:
    """Return a frame with a Xing header, in the form of another frame of the file."""
    # Without a checksum, of 64 kbit/s (MPEG 2) or 128 kbit/s, which is large enough.
    start = bytes([0xFF, head[1] | 1, 8 << 4 | head[2] & 0x0C, head[3]])
    frame = _frame(start)
    assert frame is not None
    header = bytearray(frame.length)
    header[:4] = start
    size += frame.length
    header[frame.info_at : frame.info_at + 16] = struct.pack(">4sIII", b"Xing", 3, frames, size)
    return bytes(header)


def _without_sound(content: bytes, held: int) -> tuple[bytes, int]:
    """Return a frame of layer III whose granules are empty, and how many bytes it holds.

    They are bits of later frames, as are those of the frames before, of which it has to claim as
    many as possible: mpg123 keeps no others.
    """
    frame = _frame(content)
    if frame is None or frame.length != len(content):  # the file has changed meanwhile
        return bytes(content), 0
    checksum, size = (b"" if content[1] & 1 else bytes(2)), frame.info_at - 4
    # The first 9 or 8 bits: where the bits of the frame begin, in bytes before it.
    begin = min(held, 511) << 7 if frame.version == 3 else min(held, 255) << 8
    side = begin.to_bytes(2, "big") + bytes(size - 2)
    if checksum:
        checksum = _crc(content[2:4] + side, 16, 0x8005, 0xFFFF).to_bytes(2, "big")
    remainder = content[4 + len(checksum) + size :]
    return content[:4] + checksum + side + remainder, len(remainder)
