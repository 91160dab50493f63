"""Audio of any file that ffmpeg reads, such as MP4, M4A and WebM: as a stream, or as FLAC."""

import os
import re
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, BinaryIO, cast

import numpy as np
import soundfile

from effasr.data.atomic_files import atomic_file
from effasr.data.audio.audio_file import (
    LOSSY_TOLERANCE,
    SAMPLES_PER_BYTE,
    AudioError,
    AudioProblem,
    regular_file_size,
)

PATIENCE_S = 60.0  # seconds within which ffmpeg must return a sample

# Formats of ffmpeg that have their audio in the file itself. Others, such as playlists (hls, dash,
# concat) and scripts (avisynth), name files that would be read, too.
_FORMATS = (
    "aac", "ac3", "aiff", "alaw", "amr", "amrnb", "amrwb", "ape", "asf", "au", "avi", "caf", "dsf",
    "dts", "dtshd", "dv", "eac3", "flac", "flv", "g722", "g726", "gsm", "gxf", "ircam", "iff",
    "loas", "matroska", "mlp", "mov", "mp3", "mpc", "mpc8", "mpeg", "mpegts", "mpegvideo", "mulaw",
    "mxf", "nistsphere", "nut", "ogg", "oma", "qcp", "rm", "shn", "sox", "spdif", "swf", "tak",
    "truehd", "tta", "voc", "w64", "wav", "webm", "wtv", "wv", "xwma",
)  # fmt: skip

# Address space that ffmpeg may take; it takes 0.2 GB, and more with shared libraries.
_MEMORY_BYTES = 4 << 30

_BLOCK_S = 10
_LEAST_HOLE_S = 0.1  # as in aresample: less is the delay of a codec
_SILENCE = 1 << 18  # samples
_BYTES = 4  # per float32 sample

_WHO = re.compile(r"^\[[^\]]*\] ")  # prefix of ffmpeg's messages: a component and its address


def ffmpeg_blocks(
    path: str | Path,
    sample_rate: int,  # sample rate of the result in Hz
    reason: str,
    offset: float = 0.0,
    duration: float | None = None,
    track: int = 0,
    channels: Sequence[int] | None = None,
) -> Generator[np.ndarray]:
    """Decode an audio track of a file to blocks of float32 (samples,), mono.

    Time is that of the container: what is missing before the audio, or in it, is silence. The
    chosen ``channels`` are averaged; by default all are mixed as ffmpeg does. Where only a part
    can be decoded, an error follows the last block.
    """
    size = regular_file_size(path)
    # Seeking to 0 has an effect: it shifts some formats by the delay of their codec.
    begin = ["-ss", _seconds(offset)] if offset else []
    # Up to version 8 it counts from the first sample, where the audio begins later.
    length = [] if duration is None else ["-t", _seconds(duration)]
    command = [
        *_reading(path, reason, begin, track, channels),
        *length,
        *("-ac", "1", "-ar", str(sample_rate), "-f", "f32le", "pipe:1"),
    ]
    most = SAMPLES_PER_BYTE * size
    longest = most if duration is None else min(most, round(duration * sample_rate))
    return _blocks(command, str(path), sample_rate, most, longest, max(channels or (0,)))


def ffmpeg_channels(path: str | Path, track: int = 0) -> int:
    regular_file_size(path)
    command = [*_reading(path, "", [], track), "-frames:a", "1", "-f", "s16le", "pipe:1"]
    with tempfile.TemporaryFile() as log:
        for _ in _chunks(command, str(path), _BLOCK_S * _BYTES, log):
            pass
        return _begin(log, 1)[1]


def write_flac(path: str | Path, target: Path, reason: str) -> None:
    """Write the first audio track of a file as FLAC of 16 bits, with all its channels.

    Time is that of the container: what is missing before the audio, or in it, is silence. A file
    that ffmpeg reads only in part is refused.
    """
    most = _MAX_CHANNELS * SAMPLES_PER_BYTE * regular_file_size(path)
    command = [
        *_reading(path, reason, []),
        *("-c:a", "pcm_s16be", "-f", "au", "pipe:1"),
    ]
    with tempfile.TemporaryFile() as log, tempfile.TemporaryFile(dir=target.parent) as file:
        with closing(_chunks(command, str(path), _BLOCK_S * 64_000, log)) as chunks:
            for data in chunks:
                file.write(data)
                if file.tell() > most:
                    raise AudioError(
                        AudioProblem.UNREADABLE,
                        f"{path}: ffmpeg gives more than {most} bytes, which it cannot hold.",
                    )
        log.seek(0)
        words = log.read().decode("utf-8", "replace")
        if (problem := _PROBLEM.search(words)) is not None:
            raise AudioError(AudioProblem.UNREADABLE, f"{path}: ffmpeg: {problem[1][:200]}")
        if not file.tell():
            raise AudioError(AudioProblem.EMPTY, f"{path}: ffmpeg gives no samples.")
        file.seek(0)
        with soundfile.SoundFile(cast("BinaryIO", file)) as audio:
            before, _ = _begin(log, audio.samplerate)
            stated = None if _GUESSED.search(words) else _DURATION.search(words)
            if stated is not None:
                hours, minutes, seconds = map(float, stated.groups())
                there = (before + audio.frames) / audio.samplerate
                missing = 3600 * hours + 60 * minutes + seconds - there
                if missing > LOSSY_TOLERANCE:
                    raise AudioError(
                        AudioProblem.DURATION,
                        f"{path}: the file was cut short: {missing:.3f} s are missing.",
                    )
            shape = audio.samplerate, audio.channels, "PCM_16"
            with (
                atomic_file(target) as copy,
                soundfile.SoundFile(cast("BinaryIO", copy), "w", *shape, format="FLAC") as flac,
            ):
                for block in _silence(before, audio.channels):
                    flac.write(block)
                for block in audio.blocks(1 << 16, dtype="int16"):
                    flac.write(block)


_MAX_CHANNELS = 8  # of FLAC
# Lines such as "[aac @ 0x5] [error] partial file", and warnings of packets that are not whole. The
# times of samples overlap a little where their rate changes.
_PROBLEM = re.compile(
    r"^(?:\[[^\]\n]*@[^\]\n]*\] )?\[(?:error|fatal|warning(?=\].*[Cc]orrupt))\] "
    r"((?!.*non monotonically).*)",
    re.MULTILINE,
)
# Videos may be longer than their audio; of raw streams ffmpeg guesses how long they are.
_GUESSED = re.compile(r"Video: |Estimating duration")
_DURATION = re.compile(r"Duration: (\d+):(\d+):(\d+\.\d+)")
_QUIET = re.compile(r"^(?:\[[^\]]*@[^\]]*\] )?\[(?:info|warning)\]")
_NO_TRACK = re.compile(r"Stream map '.*' matches no streams")  # which one, old versions name alone
_MAX_LOG = 1 << 22  # bytes; texts in a file, such as lyrics, are logged too


# Fills holes between the times of packets, and logs the time of the first one. `first_pts` of
# aresample would fill the time before it, but again at each change of the sample rate.
_TIMELINE = (
    "aresample=async=1,asplit[samples][first];[first]aselect=eq(n\\,0),ashowinfo,anullsink;"
    "[samples]"
)
_FIRST = re.compile(rb"ashowinfo.* pts_time:(-?[\d.]+).* channels:(\d+)")


def _begin(log: IO[bytes], sample_rate: int) -> tuple[int, int]:
    """Return the samples before the first one, once that has been read, and its channels."""
    # ffmpeg writes at the position of the file, which must not change.
    first = _FIRST.search(os.pread(log.fileno(), _MAX_LOG, 0))
    seconds, channels = (0.0, 1) if first is None else (float(first[1]), int(first[2]))
    return round(seconds * sample_rate) if seconds >= _LEAST_HOLE_S else 0, channels


def _reading(
    path: str | Path,
    reason: str,
    begin: list[str],
    track: int = 0,
    channels: Sequence[int] | None = None,
) -> list[str]:
    """Return the part of a command that reads an audio track of a file."""
    program = shutil.which("ffmpeg")
    if program is None:
        raise AudioError(
            AudioProblem.UNREADABLE,
            f"{reason} ffmpeg might read it, but is not on the PATH: install it.",
        )
    chosen = channels or ()
    terms = "+".join(f"{1 / len(chosen):.9f}*c{channel}" for channel in chosen)
    return [
        # A decoder would have a thread for each core, and memory of its own in each.
        *(program, "-nostdin", "-hide_banner", "-nostats", "-threads", "1"),
        *("-loglevel", "level+info"),
        *("-protocol_whitelist", "file", "-format_whitelist", ",".join(_FORMATS), *begin),
        # Else the time of MPEG streams begins with the audio, not with the video: without an
        # offset up to version 8, and from 9 on where the video is discarded.
        *("-itsoffset", "0.000001", "-discard:v", "default"),
        *("-i", f"file:{os.fspath(path)}", "-map", f"0:a:{track}", "-vn", "-sn", "-dn"),
        *("-af", _TIMELINE + (f"pan=mono|c0={terms}" if terms else "anull")),
    ]


def _seconds(value: float) -> str:
    """Return seconds as ffmpeg reads them: to a microsecond, and without an exponent."""
    return f"{value:.6f}"


def _blocks(
    command: list[str], name: str, sample_rate: int, most: int, longest: int, channel: int
) -> Generator[np.ndarray]:
    """Yield up to ``longest`` samples; more than ``most`` are an error."""
    with tempfile.TemporaryFile() as log:
        count = 0
        with closing(_chunks(command, name, _BLOCK_S * sample_rate * _BYTES, log)) as chunks:
            for samples in _samples(chunks, log, name, sample_rate, channel):
                if not np.isfinite(samples).all():
                    raise AudioError(
                        AudioProblem.NOT_FINITE, f"{name}: a sample is NaN or infinite."
                    )
                block = samples[: max(0, longest - count)]
                count += len(samples)
                if count > most:
                    raise AudioError(
                        AudioProblem.UNREADABLE,
                        f"{name}: ffmpeg gives more than {most} samples, which the file cannot "
                        "hold.",
                    )
                if len(block):
                    yield block
        if not count and longest < most and _begin(log, sample_rate)[0] >= longest:
            yield from (block[:, 0] for block in _silence(longest, 1))
        elif not count:
            words = _last_words(log, 0, command)
            raise AudioError(AudioProblem.UNREADABLE, f"{name}: ffmpeg: {words}")
        words = os.pread(log.fileno(), _MAX_LOG, 0).decode("utf-8", "replace")
        if (problem := _PROBLEM.search(words)) is not None:
            raise AudioError(AudioProblem.UNREADABLE, f"{name}: ffmpeg: {problem[1][:200]}")


def _samples(
    chunks: Iterator[bytes], log: IO[bytes], name: str, sample_rate: int, channel: int
) -> Iterator[np.ndarray]:
    for number, data in enumerate(chunks):
        if not number:
            before, channels = _begin(log, sample_rate)
            # For `pan`, a channel that does not exist is silent.
            if channel >= channels:
                raise AudioError(
                    AudioProblem.UNREADABLE,
                    f"{name}: channel {channel} is wanted, but the file has {channels}.",
                )
            yield from (block[:, 0] for block in _silence(before, 1))
        yield np.frombuffer(data[: len(data) // _BYTES * _BYTES], "<f4")


def _silence(samples: int, channels: int) -> Iterator[np.ndarray]:
    """Yield zeros, 16 bits or float32 alike: (samples, channels)."""
    for begin in range(0, samples, _SILENCE):
        yield np.zeros((min(_SILENCE, samples - begin), channels), np.float32)


def _chunks(command: list[str], name: str, size: int, log: IO[bytes]) -> Generator[bytes]:
    """Yield what a program writes; it ends with the generator."""
    # Ctrl-C, which a terminal sends to the whole group, must not end the audio early.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, process_group=0
    )
    assert process.stdout is not None
    _limit_memory(process.pid)
    try:
        while data := _read(process.stdout, size, name):
            yield data
        code = process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if code:
        words = _last_words(log, code, command)
        raise AudioError(AudioProblem.UNREADABLE, f"{name}: ffmpeg: {words}")


def _limit_memory(process: int) -> None:
    if sys.platform != "linux":
        return
    now = resource.prlimit(process, resource.RLIMIT_AS)
    limit = min(bound for bound in (_MEMORY_BYTES, *now) if bound != resource.RLIM_INFINITY)
    resource.prlimit(process, resource.RLIMIT_AS, (limit, limit))


def _read(pipe: IO[bytes], size: int, name: str) -> bytes:
    """Read this many bytes, or all that are left."""
    parts, missing = [], size
    due = time.monotonic() + PATIENCE_S
    while missing:
        if not select.select([pipe], [], [], max(0.0, due - time.monotonic()))[0]:
            raise AudioError(
                AudioProblem.UNREADABLE, f"{name}: ffmpeg gave no audio for {PATIENCE_S:g} s."
            )
        data = os.read(pipe.fileno(), missing)
        if not data:
            break
        parts.append(data)
        missing -= len(data)
        due = time.monotonic() + PATIENCE_S
    return b"".join(parts)


def _last_words(log: IO[bytes], code: int, command: list[str]) -> str:
    lines = os.pread(log.fileno(), _MAX_LOG, 0).decode("utf-8", "replace").split("\n")
    messages = [line.strip() for line in lines if line.strip() and not _QUIET.search(line)]
    if (problem := _PROBLEM.search("\n".join(messages))) is not None:
        messages = [problem[1]]
    if messages and "not on whitelist" in messages[0]:
        return "not a format that has its audio in the file itself."
    if messages and _NO_TRACK.search(messages[0]):
        number = int(command[command.index("-map") + 1].rpartition(":")[2])
        return f"no audio track {number}: tracks count from 0." if number else "no audio track."
    # The first line names the cause, the last only its consequence.
    return _WHO.sub("", messages[0])[:200] if messages else f"no audio (exit code {code})."
