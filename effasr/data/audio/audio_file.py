"""Opens audio files, and refuses those whose header is implausible."""

from __future__ import annotations

import enum
import io
import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import soundfile

from effasr.untrusted.files import open_regular

DURATION_TOLERANCE = 0.1
"""Seconds by which a file may miss the length that its manifest states.

Manifests round durations, and an MP3 header may be one codec frame off."""

RATES = range(1_000, 1_000_001)
"""Sample rates in Hz that are believed: a header of 1 Hz makes an hour of every kilobyte."""

_UNKNOWN = 2**63 - 1
"""What libsndfile says of a FLAC whose header has no number of samples."""

SAMPLES_PER_BYTE = 8192
"""No codec does better: FLAC's longest block of silence is 65,535 samples in about 11 bytes."""

_MOST_MEMBER_BYTES = 4 << 30
"""Largest size of an audio file inside a tar, which is read as a whole; a WAV file has no more."""


class AudioProblem(enum.StrEnum):
    """Problems of a recording."""

    MISSING = "missing_audio"
    UNREADABLE = "unreadable_audio"
    EMPTY = "empty_audio"
    NOT_FINITE = "not_finite_audio"
    SILENT = "silent_audio"
    DURATION = "duration_mismatch"


class AudioError(ValueError):
    """A recording cannot be used."""

    def __init__(self, problem: AudioProblem, message: str) -> None:
        super().__init__(message)
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a worker process return it by pickling it."""
        return type(self), (self.problem, str(self))


class UnknownFormat(AudioError):
    """A file is none that soundfile can read; another program may."""


@dataclass(frozen=True, slots=True)
class TarMember:
    """An audio file inside an uncompressed tar file."""

    tar: str  # The tar file
    offset: int  # Byte offset of the audio file
    size: int  # Bytes of the audio file

    def __str__(self) -> str:
        return f"{self.tar}[{self.offset}:{self.offset + self.size}]"

    @classmethod
    def parse(cls, text: str) -> TarMember | None:
        """Return the inverse of ``str``; None where the text is no such place."""
        found = _TAR_MEMBER.fullmatch(text)
        return found and cls(found[1], int(found[2]), int(found[3]) - int(found[2]))


_TAR_MEMBER = re.compile(r"(.+)\[(\d+):(\d+)\]", re.DOTALL)


def open_audio(path: str | Path | TarMember) -> soundfile.SoundFile:
    """Open a file whose header can be believed; see `read_audio`."""
    if isinstance(path, TarMember):
        return _checked_file(_open(_bytes_of(path), path), path, path.size)
    size = regular_file_size(path)
    # soundfile would encode the name strictly, and not all names are text.
    return _checked_file(_open(os.fsencode(path), path), path, size)


def regular_file_size(path: str | Path) -> int:
    """Return the bytes of an existing file that can be read without waiting for a writer."""
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
    """Return the audio file; a place that a manifest names is checked before memory is taken."""
    if member.size > _MOST_MEMBER_BYTES:
        raise AudioError(
            AudioProblem.UNREADABLE,
            f"{member}: an audio file in a tar file must have at most {_MOST_MEMBER_BYTES} bytes.",
        )
    data = b""
    try:
        with open_regular(member.tar) as file:
            if 0 < member.size <= os.fstat(file.fileno()).st_size - member.offset:
                file.seek(member.offset)
                data = file.read(member.size)
    except OSError as error:
        raise AudioError(AudioProblem.MISSING, f"{member}: {one_line(error)}") from error
    except ValueError as error:
        raise AudioError(AudioProblem.UNREADABLE, one_line(error)) from error
    if not data or len(data) < member.size:
        raise AudioError(AudioProblem.UNREADABLE, f"{member}: the tar file ends before.")
    return io.BytesIO(data)


def _open(file: Any, path: str | Path | TarMember) -> soundfile.SoundFile:
    try:
        return soundfile.SoundFile(file)
    # TypeError for a name that ends in .raw, of which soundfile wants to be told the rate.
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        raise UnknownFormat(
            AudioProblem.UNREADABLE, f"{path}: not a readable audio file: {reason(error)}"
        ) from error


def _checked_file(
    file: soundfile.SoundFile, path: str | Path | TarMember, size: int
) -> soundfile.SoundFile:
    if file.frames <= 0 or file.samplerate <= 0:
        file.close()
        raise AudioError(AudioProblem.EMPTY, f"{path}: the file holds no samples.")
    claim = None
    if (file.format, file.subtype) == ("RAW", "ULAW"):
        # libsndfile takes whatever is named .au or .snd for telephone speech.
        file.close()
        raise AudioError(
            AudioProblem.UNREADABLE, f"{path}: not a readable audio file: it has no header."
        )
    if file.frames == _UNKNOWN:
        file.close()
        raise UnknownFormat(
            AudioProblem.UNREADABLE,
            f"{path}: the header does not say how long it is, as of what was written to a pipe: "
            "write it to a file.",
        )
    if file.samplerate not in RATES:
        claim = f"a sample rate of {file.samplerate} Hz, which is not from 1 kHz to 1 MHz"
    elif file.frames > SAMPLES_PER_BYTE * size:
        claim = f"{file.frames} samples, which {size} bytes cannot hold"
    if claim is not None:
        file.close()
        raise AudioError(AudioProblem.UNREADABLE, f"{path}: the header claims {claim}.")
    return file


def check_not_cut_short(file: soundfile.SoundFile, path: str | Path | TarMember) -> None:
    """See that a WAV file holds what its header promises, where its length is taken from it."""
    if file.format not in ("WAV", "WAVEX") or isinstance(path, TarMember):
        return
    with open(path, "rb") as opened:
        share = missing_share(opened, os.fstat(opened.fileno()).st_size)
    there = file.frames / file.samplerate
    missing = there * share / (1 - share)
    if missing > DURATION_TOLERANCE:
        raise AudioError(
            AudioProblem.DURATION,
            f"{path}: the file was cut short: {missing:.3f} s of {there + missing:.3f} s are "
            "missing.",
        )


def reason(error: Exception) -> str:
    """Return soundfile's message as one short sentence."""
    return f"{one_line(getattr(error, 'error_string', error)).rstrip('.')}."


def one_line(error: object) -> str:
    """Return a message on one line, and not a long one."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


# Finds out how much of a truncated WAV file is missing; libsndfile does not report it.

_UNKNOWN_RIFF_SIZE = 0x7FFF_0000
"""Sizes from here on stand for "not known yet": programs that write to a pipe claim such ones."""

_CHUNKS = 1000
"""Limit of the chunks before the data of a file; intact files have fewer."""


def missing_share(file: BinaryIO, size: int) -> float:
    """Return the part of the samples that the header of a RIFF file promises and that is not there.

    The file, of ``size`` bytes, is read from its beginning.
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
            return 0.0 if length >= _UNKNOWN_RIFF_SIZE or there >= length else 1 - there / length
        file.seek(length + length % 2, 1)
    return 0.0
