"""Opens audio files as they really are, and refuses those whose header is implausible."""

from __future__ import annotations

import enum
import io
import math
import os
import re
import stat
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import soundfile

from effasr.data.audio.containers import Layout, MpegFrames, View, examine
from effasr.data.audio.embedded import Embedded
from effasr.untrusted import remote
from effasr.untrusted.files import open_checked

DURATION_TOLERANCE = 0.1
"""Seconds by which a file may miss the length that its manifest states, which may be rounded."""

LOSSY_TOLERANCE = 0.5
"""The same for codecs that add silence at both ends: the length that lhotse allows for MP3."""

RATES = range(1_000, 1_000_001)
"""Sample rates in Hz that are believed: a header of 1 Hz makes an hour of every kilobyte."""

_UNKNOWN = 2**63 - 1
"""What libsndfile says of a FLAC whose header has no number of samples."""

SAMPLES_PER_BYTE = 8192
"""No codec does better: FLAC's longest block of silence is 65,535 samples in about 11 bytes."""


class AudioProblem(enum.StrEnum):
    """Problems of a recording."""

    MISSING = "missing_audio"
    UNREADABLE = "unreadable_audio"
    EMPTY = "empty_audio"
    NOT_FINITE = "not_finite_audio"
    SILENT = "silent_audio"
    ANTIPHASE = "antiphase_audio"
    DURATION = "duration_mismatch"
    ROW = "malformed_row"


class AudioError(ValueError):
    """A recording cannot be used."""

    def __init__(self, problem: AudioProblem, message: str) -> None:
        super().__init__(remote.shown(message))
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a worker process return it by pickling it."""
        return type(self), (self.problem, str(self))


class UnknownFormat(AudioError):
    """A file is none that soundfile can read; another program may."""


class _Mpeg(soundfile.SoundFile):
    """MP3 that is read in order: soundfile seeks after each read, which changes what comes next."""

    def seekable(self) -> bool:
        return False


class AudioFile:
    """An audio file, which may consist of several that were joined; read as one."""

    def __init__(
        self,
        path: str | Path | Embedded,
        parts: Sequence[soundfile.SoundFile],
        layout: Layout,
        size: int,
        file: BinaryIO,
    ) -> None:
        first = parts[0]
        self.samplerate: int = first.samplerate
        self.channels: int = first.channels
        self.format: str = first.format
        self._path, self._parts, self._file, self._layout = path, list(parts), file, layout
        self._starts = [0, *accumulate(part.frames for part in parts)]
        self._size = size
        self._position = 0

    @property
    def frames(self) -> int:
        """Number of samples of a channel."""
        return self._starts[-1]

    @property
    def subtype(self) -> str:
        """Name of the encoding in soundfile."""
        return self._parts[0].subtype

    @property
    def tolerance(self) -> float:
        """Seconds by which the length may differ from that in a manifest."""
        return LOSSY_TOLERANCE if self.format in _LOSSY else DURATION_TOLERANCE

    def seek(self, frame: int) -> None:
        """Continue with another sample."""
        number = bisect_right(self._starts, frame, hi=len(self._parts)) - 1
        inside = frame - self._starts[number]
        if self._layout.mpeg is not None:
            self._seek_mpeg(self._layout.mpeg, inside)
        else:
            self._parts[number].seek(inside)
        for part in self._parts[number + 1 :]:
            part.seek(0)
        self._position = frame

    def _seek_mpeg(self, mpeg: MpegFrames, sample: int) -> None:
        """Decode from a few frames before a sample: libsndfile seeks without the bits in them."""
        # A view from the first frame on has the length of all frames, less the decoder's delay.
        begins_at = 0
        if self.frames != len(mpeg.starts) * mpeg.samples - _MPEG_DECODER_DELAY:
            begins_at = mpeg.delay
        target = (sample + begins_at) // mpeg.samples
        first, pieces = mpeg.view_before(self._file, target)
        self._parts[0].close()
        self._parts[0] = _Mpeg(View(self._file, pieces))  # type: ignore[arg-type]
        ahead = sample + begins_at - first * mpeg.samples
        while ahead > 0 and (count := len(self._parts[0].read(min(ahead, 1 << 16)))):
            ahead -= count

    def read(self, frames: int) -> np.ndarray:
        """Read up to so many samples, float32 (samples, channels); fewer at the end only."""
        blocks: list[np.ndarray] = []
        while frames > 0 and self._position < self.frames:
            number = bisect_right(self._starts, self._position, hi=len(self._parts)) - 1
            count = min(frames, self._starts[number + 1] - self._position)
            block = self._parts[number].read(count, dtype="float32", always_2d=True)
            blocks.append(block)
            self._position += len(block)
            frames -= len(block)
            if len(block) < count:
                break
        if not blocks:
            return np.zeros((0, self.channels), np.float32)
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    def check_complete(self) -> None:
        """Check that the file holds what its headers promise, and nothing that they do not know."""
        rate, layout = self.samplerate, self._layout
        there = self.frames / rate
        missing = layout.missing_s or there * layout.missing / (1 - layout.missing)
        if self.format in _STATED_IN_LOG:
            stated = _stated_in_log(self._parts[0]) / rate
            if self.format == "SDS":  # libsndfile returns what the header says, and logs the other
                there, stated = stated, there
            missing = max(0.0, stated - there)
        if math.isinf(missing):
            raise AudioError(
                AudioProblem.DURATION, f"{self._path}: the file was cut short, after {there:.3f} s."
            )
        if missing and missing > self.tolerance:
            raise AudioError(
                AudioProblem.DURATION,
                f"{self._path}: the file was cut short: {missing:.3f} s of {there + missing:.3f} s "
                "are missing.",
            )
        if not layout.following:
            return
        known = self._size - layout.following
        # In some containers libsndfile goes on to the end of the file.
        is_read = self.frames * self.channels * _WIDTHS.get(self.subtype, 0) > known
        if layout.following * there > self.tolerance * known and not is_read:
            raise AudioError(
                AudioProblem.DURATION,
                f"{self._path}: the header says {there:.3f} s, but {layout.following} bytes "
                f"follow, perhaps {layout.following * there / known:.3f} s more: "
                f"`sox --ignore-length {self._path} whole.wav` reads all of them.",
            )

    def close(self) -> None:
        for part in self._parts:
            part.close()
        self._file.close()

    def __enter__(self) -> AudioFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_WIDTHS = {
    **dict.fromkeys(("PCM_S8", "PCM_U8", "ALAW", "ULAW"), 1),
    **{"PCM_16": 2, "PCM_24": 3, "PCM_32": 4, "FLOAT": 4, "DOUBLE": 8},
}  # bytes of a sample
_STATED_IN_LOG = {"AVR", "MAT4", "MAT5", "MPC2K", "SDS", "SVX", "VOC", "WVE"}
_FRAMES_IN_LOG = re.compile(r"\b(?:Frames|Cols) *: (\d+)")
_BYTES_IN_LOG = re.compile(r"(?:BODY :|Data length) (\d+) \(?should be (\d+)")
_VOC_BLOCK_IN_LOG = re.compile(r"Extended II : (\d+)")
_LOSSY = {"MP3", "OGG", "MPEG"}
_MAX_PARTS = 64  # each has a decoder of about 170 KB
_MPEG_DECODER_DELAY = 529  # samples that libsndfile leaves out at the beginning


def _stated_in_log(file: soundfile.SoundFile) -> float:
    """Return the samples that a header promises, in formats that libsndfile alone parses here.

    It takes what there is for the length, but its log has the header. IRCAM, PAF and PVF have no
    length in theirs.
    """
    text = file.extra_info
    if (block := _VOC_BLOCK_IN_LOG.search(text)) is not None:
        return (int(block[1]) - 12) / (file.channels * _WIDTHS.get(file.subtype, 1))
    if (size := _BYTES_IN_LOG.search(text)) is not None:
        return file.frames * int(size[1]) / max(1, int(size[2]))
    frames = _FRAMES_IN_LOG.findall(text)
    return int(frames[-1]) if frames else file.frames


def open_audio(path: str | Path | Embedded, *, thorough: bool = True) -> AudioFile:
    """Open a file whose header can be believed, or was corrected; see `containers.examine`."""
    file: Any
    if isinstance(path, Embedded):
        try:
            file = io.BytesIO(path.read())
        except OSError as error:
            raise AudioError(AudioProblem.MISSING, f"{path}: {one_line(error)}") from error
        except ValueError as error:
            raise AudioError(AudioProblem.UNREADABLE, one_line(error)) from error
        size, status = file.getbuffer().nbytes, None
    else:
        status = _regular_file(path)
        size, file = status.st_size, _opened(path)
    parts: list[soundfile.SoundFile] = []
    try:
        layout = _layout(file, status, thorough=thorough)
        if len(layout.parts) > _MAX_PARTS:
            raise AudioError(
                AudioProblem.UNREADABLE,
                f"{path}: joined of {len(layout.parts)} files, over {_MAX_PARTS}: make one file of "
                "them, such as by `ffmpeg -i`.",
            )
        if layout.parts:
            views = [View(file, pieces) for pieces in layout.parts]
            parts += [_open(view, path, layout) for view in views]
        elif isinstance(path, Embedded):
            file.seek(0)
            parts.append(_open(file, path, layout))
        else:
            # soundfile would encode the name strictly, and not all names are text.
            parts.append(_open(os.fsencode(path), path, layout))
        for part in parts:
            _check_header(part, path, size)
        kinds = {(part.samplerate, part.channels) for part in parts}
        if len(kinds) > 1:
            raise AudioError(
                AudioProblem.UNREADABLE,
                f"{path}: joined of files that differ in sample rate or channels: "
                + ", ".join(f"{rate} Hz x {channels}" for rate, channels in sorted(kinds))
                + ": make one file of each part.",
            )
        return AudioFile(path, parts, layout, size, file)
    except BaseException:
        for part in parts:
            part.close()
        file.close()
        raise


_layouts: OrderedDict[tuple[object, ...], Layout] = OrderedDict()
_MAX_LAYOUTS = 64  # an hour of MP3 has 2 MB of them


def _layout(file: BinaryIO, status: os.stat_result | None, *, thorough: bool) -> Layout:
    """Return the layout of a file; it is kept, as the audio is read after the header.

    Walking an hour of MP3 takes a third of a second, as long as a hundred utterances of it.
    """
    if status is None:
        return examine(file, thorough=thorough)
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    layout = _layouts.get(key)
    if layout is None:
        layout = examine(file, thorough=thorough)
        if thorough or layout.mpeg is not None or layout.parts:
            _layouts[key] = layout
            while len(_layouts) > _MAX_LAYOUTS:
                with suppress(KeyError):  # another thread may have removed it
                    _layouts.popitem(last=False)
    return layout


def regular_file_size(path: str | Path) -> int:
    """Return the bytes of an existing file that can be read without waiting for a writer."""
    size = _regular_file(path).st_size
    if not os.access(path, os.R_OK):
        raise AudioError(AudioProblem.UNREADABLE, f"{path}: Permission denied.")
    return size


def _opened(path: str | Path) -> io.FileIO:
    try:
        return open_checked(path)
    except (OSError, ValueError) as error:  # it has changed meanwhile, or may not be read
        text = getattr(error, "strerror", None) or one_line(error)
        raise AudioError(AudioProblem.UNREADABLE, f"{path}: {text}.") from error


def _regular_file(path: str | Path) -> os.stat_result:
    try:
        remote.ensure(path)
        result = os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise AudioError(AudioProblem.MISSING, f"{path}: there is no such file.") from None
    except OSError as error:
        raise AudioError(AudioProblem.MISSING, f"{path}: {error.strerror}.") from error
    if stat.S_ISDIR(result.st_mode):
        raise AudioError(AudioProblem.UNREADABLE, f"{path}: not an audio file but a folder.")
    if not stat.S_ISREG(result.st_mode):
        raise AudioError(AudioProblem.UNREADABLE, f"{path}: not a file but a pipe or a device.")
    if result.st_size == 0:
        raise AudioError(AudioProblem.EMPTY, f"{path}: the file is empty.")
    return result


def _open(file: Any, path: str | Path | Embedded, layout: Layout) -> soundfile.SoundFile:
    try:
        return (soundfile.SoundFile if layout.mpeg is None else _Mpeg)(file)
    # TypeError for a name that ends in .raw, of which soundfile wants to be told the rate.
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        if layout.missing or layout.missing_s:
            raise AudioError(
                AudioProblem.DURATION, f"{path}: the file was cut short, and cannot be read."
            ) from error
        raise UnknownFormat(
            AudioProblem.UNREADABLE, f"{path}: not a readable audio file: {reason(error)}"
        ) from error


def _check_header(file: soundfile.SoundFile, path: str | Path | Embedded, size: int) -> None:
    if file.frames <= 0 or file.samplerate <= 0:
        raise AudioError(AudioProblem.EMPTY, f"{path}: the file holds no samples.")
    if file.format == "RAW" and file.subtype == "ULAW":
        # libsndfile takes whatever is named .au or .snd for telephone speech.
        raise AudioError(
            AudioProblem.UNREADABLE, f"{path}: not a readable audio file: it has no header."
        )
    if file.frames == _UNKNOWN:
        raise UnknownFormat(
            AudioProblem.UNREADABLE,
            f"{path}: neither the header nor the last frame says how long it is.",
        )
    claim = None
    if file.samplerate not in RATES:
        claim = f"a sample rate of {file.samplerate} Hz, which is not from 1 kHz to 1 MHz"
    elif file.frames > SAMPLES_PER_BYTE * size:
        claim = f"{file.frames} samples, which {size} bytes cannot hold"
    if claim is not None:
        raise AudioError(AudioProblem.UNREADABLE, f"{path}: the header claims {claim}.")


def reason(error: Exception) -> str:
    """Return soundfile's message as one short sentence."""
    return f"{one_line(getattr(error, 'error_string', error)).rstrip('.')}."


def one_line(error: object) -> str:
    """Return a message on one line, and not a long one; behind a long path stands the reason."""
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:100]} ... {text[-300:]}"
