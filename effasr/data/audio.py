"""Waveforms from files: mono, float32, at one sample rate, or an error that says why not."""

from __future__ import annotations

import enum
import io
import math
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from lhotse.cut import Cut
from lhotse.cut.data import DataCut

from effasr.data.features import SAMPLE_RATE

DURATION_TOLERANCE = 0.1
"""Seconds by which a file may miss the length that its manifest states.

Manifests round durations, and an MP3 header may be one codec frame off."""

RATES = range(1_000, 1_000_001)
"""Sample rates in Hz that are believed: a header of 1 Hz makes an hour of every kilobyte."""

_BLOCK = 2**20
"""Values that are decoded at a time: a header may claim more than there is, or than fits."""

_LOUDEST = 2.0**31
"""Full scale is 1, but some files have integers as floating point. More overflows the features."""

_SAMPLES_PER_BYTE = 8192
"""No codec does better: FLAC's longest block of silence is 65,535 samples in about 11 bytes."""


class AudioProblem(enum.StrEnum):
    """What can be wrong with a recording."""

    MISSING = "missing_audio"
    UNREADABLE = "unreadable_audio"
    EMPTY = "empty_audio"
    NOT_FINITE = "not_finite_audio"
    SILENT = "silent_audio"
    DURATION = "duration_mismatch"


class AudioError(ValueError):
    """A recording cannot be used.

    Attributes:
        problem: The kind of fault, for counting.
    """

    def __init__(self, problem: AudioProblem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


class UnknownFormat(AudioError):
    """A file is none that soundfile can read; another program may."""


@dataclass(frozen=True, slots=True)
class TarMember:
    """An audio file inside an uncompressed tar file.

    Attributes:
        tar: The tar file.
        offset: Where the audio file begins in it, in bytes.
        size: Bytes of the audio file.
    """

    tar: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.tar}[{self.offset}:{self.offset + self.size}]"

    @classmethod
    def parse(cls, text: str) -> TarMember | None:
        """The inverse of ``str``; None where the text is no such place."""
        found = _TAR_MEMBER.fullmatch(text)
        return found and cls(found[1], int(found[2]), int(found[3]) - int(found[2]))


_TAR_MEMBER = re.compile(r"(.+)\[(\d+):(\d+)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class AudioHeader:
    """What the header of an audio file says."""

    sample_rate: int
    num_samples: int
    channels: int

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return self.num_samples / self.sample_rate


def samples_in(seconds: float, sample_rate: int = SAMPLE_RATE) -> int:
    """The nearest number of samples to a duration; the planner and the loader both use it."""
    return math.floor(seconds * sample_rate + 0.5)


def read_header(path: str | Path) -> AudioHeader:
    """Read the header alone of a WAV, FLAC, Ogg or MP3 file.

    Raises:
        AudioError: The file is missing, is not audio, or holds no samples.
    """
    with open_audio(path) as file:
        return AudioHeader(file.samplerate, file.frames, file.channels)


def read_audio(
    path: str | Path | TarMember,
    sample_rate: int = SAMPLE_RATE,
    *,
    offset: float = 0.0,
    duration: float | None = None,
    channels: Sequence[int] | None = None,
) -> np.ndarray:
    """Read a file, or a part of it, as one channel.

    Only the wanted part is decoded.

    Args:
        path: A WAV, FLAC, Ogg or MP3 file, or one inside a tar file.
        sample_rate: Rate of the result in Hz; other rates are resampled by soxr.
        offset: Where to begin, in seconds.
        duration: How much to read, in seconds; up to the end by default.
        channels: The channels to average; all by default.

    Returns:
        float32 (samples,). With a ``duration``, exactly ``samples_in(duration, sample_rate)``.

    Raises:
        AudioError: The file is missing, damaged, empty, or ends before ``offset + duration``
            by more than `DURATION_TOLERANCE`.
    """
    with open_audio(path) as file:
        rate = file.samplerate
        begin, wanted = place(file, path, offset, duration)
        blocks = list(mono_blocks(file, path, begin, wanted, channels))
    mono = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    if rate != sample_rate:
        mono = soxr.resample(mono, rate, sample_rate)
    return mono if duration is None else _fit(mono, samples_in(duration, sample_rate))


def load_audio(cut: Cut, sample_rate: int = SAMPLE_RATE) -> np.ndarray:
    """The waveform of a lhotse cut, one channel.

    Files are read with soundfile and soxr. What only lhotse can read (in-memory and remote
    recordings, mixed cuts, recordings with transforms) is read by lhotse.

    Args:
        cut: Any cut with a recording.
        sample_rate: Rate of the result in Hz.

    Returns:
        float32 (samples,), exactly ``samples_in(cut.duration, sample_rate)``.

    Raises:
        AudioError: The audio is missing, damaged, or shorter than the cut.
    """
    path = audio_path(cut) or _tar_member(cut)
    if path is not None:
        assert isinstance(cut, DataCut)
        channels = [cut.channel] if isinstance(cut.channel, int) else cut.channel
        return read_audio(
            path, sample_rate, offset=cut.start, duration=cut.duration, channels=channels
        )
    try:
        samples: Any = cut.load_audio()
    except Exception as error:  # lhotse raises whatever the storage behind it raises
        raise AudioError(
            AudioProblem.UNREADABLE, f"{cut.id}: lhotse cannot read the audio: {_line(error)}"
        ) from error
    if samples is None or samples.size == 0:
        raise AudioError(AudioProblem.EMPTY, f"{cut.id}: the cut holds no audio.")
    mono = samples.mean(axis=0, dtype=np.float32)
    if cut.sampling_rate != sample_rate:
        mono = soxr.resample(mono, cut.sampling_rate, sample_rate)
    wanted = samples_in(cut.duration, sample_rate)
    _check_complete(cut.id, mono.shape[0], wanted, sample_rate)
    return _fit(mono, wanted)


def audio_path(cut: Cut) -> str | None:
    """The one plain file that a cut is a part of; None where there is no such file."""
    if not isinstance(cut, DataCut) or cut.recording is None or cut.recording.transforms:
        return None
    sources = cut.recording.sources
    if len(sources) != 1 or sources[0].type != "file":
        return None
    return str(sources[0].source)


def _tar_member(cut: Cut) -> TarMember | None:
    """Where in a tar file the audio of a cut of a Shar folder is."""
    if not isinstance(cut, DataCut) or cut.recording is None or cut.recording.transforms:
        return None
    sources = cut.recording.sources
    if len(sources) != 1 or sources[0].type != "shar":
        return None
    return TarMember.parse(str(sources[0].source))


def open_audio(path: str | Path | TarMember) -> soundfile.SoundFile:
    """Open a file whose header can be believed; see `read_audio`.

    Raises:
        AudioError: There is none, it is no regular file, or it is not audio.
    """
    if isinstance(path, TarMember):
        return _checked_file(_open(_bytes_of(path), path), path, path.size)
    size = regular_file_size(path)
    # soundfile would encode the name strictly, and not all names are text.
    return _checked_file(_open(os.fsencode(path), path), path, size)


def regular_file_size(path: str | Path) -> int:
    """Bytes of a file that is there and can be read without waiting for somebody to write it.

    Raises:
        AudioError: It is missing, empty, a folder, a pipe or a device.
    """
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise AudioError(AudioProblem.MISSING, f"{path}: there is no such file.") from None
    except OSError as error:
        raise AudioError(AudioProblem.MISSING, f"{path}: {error.strerror}.") from error
    if stat.S_ISDIR(found.st_mode):
        raise AudioError(AudioProblem.UNREADABLE, f"{path}: not an audio file but a folder.")
    if not stat.S_ISREG(found.st_mode):
        raise AudioError(AudioProblem.UNREADABLE, f"{path}: not a file but a pipe or a device.")
    if not os.access(path, os.R_OK):
        raise AudioError(AudioProblem.UNREADABLE, f"{path}: Permission denied.")
    if found.st_size == 0:
        raise AudioError(AudioProblem.EMPTY, f"{path}: the file is empty.")
    return found.st_size


def _bytes_of(member: TarMember) -> io.BytesIO:
    try:
        with open(member.tar, "rb") as file:
            file.seek(member.offset)
            data = file.read(member.size)
    except OSError as error:
        raise AudioError(AudioProblem.MISSING, f"{member}: {_line(error)}") from error
    if len(data) < member.size or not data:
        raise AudioError(AudioProblem.UNREADABLE, f"{member}: the tar file ends before.")
    return io.BytesIO(data)


def _open(file: Any, path: str | Path | TarMember) -> soundfile.SoundFile:
    try:
        return soundfile.SoundFile(file)
    # TypeError for a name that ends in .raw, of which soundfile wants to be told the rate.
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        raise UnknownFormat(
            AudioProblem.UNREADABLE, f"{path}: not a readable audio file: {_reason(error)}"
        ) from error


def _checked_file(
    file: soundfile.SoundFile, path: str | Path | TarMember, size: int
) -> soundfile.SoundFile:
    if file.frames <= 0 or file.samplerate <= 0:
        file.close()
        raise AudioError(AudioProblem.EMPTY, f"{path}: the file holds no samples.")
    claim = None
    if file.samplerate not in RATES:
        claim = f"a sample rate of {file.samplerate} Hz, which is not from 1 kHz to 1 MHz"
    elif file.frames > _SAMPLES_PER_BYTE * size:
        claim = f"{file.frames} samples, which {size} bytes cannot hold"
    if claim is not None:
        file.close()
        raise AudioError(AudioProblem.UNREADABLE, f"{path}: the header claims {claim}.")
    return file


def place(
    file: soundfile.SoundFile, path: str | Path | TarMember, offset: float, duration: float | None
) -> tuple[int, int]:
    """The first sample of a part of a file, and how many it has.

    Raises:
        AudioError: The file ends before.
    """
    rate = file.samplerate
    begin = samples_in(offset, rate)
    if begin >= file.frames:
        raise AudioError(
            AudioProblem.DURATION,
            f"{path}: a part from {offset:g} s is wanted, but the file ends at "
            f"{file.frames / rate:g} s.",
        )
    return begin, file.frames - begin if duration is None else samples_in(duration, rate)


def mono_blocks(
    file: soundfile.SoundFile,
    path: str | Path | TarMember,
    begin: int,
    wanted: int,
    channels: Sequence[int] | None = None,
    values: int = _BLOCK,
) -> Iterator[np.ndarray]:
    """Decode a part of an open file, a block at a time.

    Args:
        file: The file.
        path: For messages.
        begin: The first sample of the part.
        wanted: Samples of the part.
        channels: The channels to average; all by default.
        values: Samples of a block, those of all channels counted.

    Yields:
        float32 (samples,), mono, at the file's rate; no array is empty.

    Raises:
        AudioError: The file is damaged, ends before the part does, or has NaN or infinite samples.
    """
    rate, left = file.samplerate, wanted
    longest = max(1, values // file.channels)
    while left:
        first = left == wanted
        samples = _read_samples(file, path, begin if first else None, min(left, longest))
        if not len(samples):
            break
        left -= len(samples)
        chosen = _choose_channels(samples, path, channels)
        if not (chosen.min() >= -_LOUDEST and chosen.max() <= _LOUDEST):  # NaN is neither
            raise AudioError(
                AudioProblem.NOT_FINITE, f"{path}: a sample is NaN or infinite, or nearly so."
            )
        yield chosen.mean(axis=1, dtype=np.float32) if chosen.shape[1] > 1 else chosen[:, 0]
    if left == wanted:
        raise AudioError(AudioProblem.EMPTY, f"{path}: no sample can be read.")
    _check_complete(path, wanted - left, wanted, rate)


def _read_samples(
    file: soundfile.SoundFile, path: str | Path | TarMember, begin: int | None, wanted: int
) -> np.ndarray:
    try:
        if begin:
            file.seek(begin)
        return file.read(wanted, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError) as error:
        raise AudioError(
            AudioProblem.UNREADABLE, f"{path}: the audio is damaged: {_reason(error)}"
        ) from error


def _choose_channels(
    samples: np.ndarray, path: str | Path | TarMember, channels: Sequence[int] | None
) -> np.ndarray:
    if channels is None or list(channels) == list(range(samples.shape[1])):
        return samples
    if max(channels) >= samples.shape[1]:
        raise AudioError(
            AudioProblem.UNREADABLE,
            f"{path}: channel {max(channels)} is wanted, but the file has {samples.shape[1]}.",
        )
    return samples[:, list(channels)]


def _check_complete(name: str | Path | TarMember, got: int, wanted: int, rate: int) -> None:
    if got < wanted - DURATION_TOLERANCE * rate:
        raise AudioError(
            AudioProblem.DURATION,
            f"{name}: {wanted / rate:.3f} s are wanted, but only {got / rate:.3f} s can be read.",
        )


def _fit(mono: np.ndarray, length: int) -> np.ndarray:
    """Cut or zero-fill the few samples by which rounding missed ``length``."""
    if mono.shape[0] >= length:
        return np.ascontiguousarray(mono[:length])
    return np.pad(mono, (0, length - mono.shape[0]))


def _reason(error: Exception) -> str:
    return _line(getattr(error, "error_string", error))


def _line(error: object) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:200]}..."
