"""Audio of any file that ffmpeg reads, such as MP4, M4A and WebM, decoded as a stream."""

from __future__ import annotations

import os
import re
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from effasr.data.audio.audio_file import (
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
_BYTES = 4  # per float32 sample

_WHO = re.compile(r"^\[[^\]]*\] ")  # prefix of ffmpeg's messages: a component and its address


def ffmpeg_blocks(
    path: str | Path,
    sample_rate: int,  # sample rate of the result in Hz
    reason: str,
    offset: float = 0.0,
    duration: float | None = None,
) -> Iterator[np.ndarray]:
    """Decode the first audio track of a file to blocks of float32 (samples,), mono."""
    size = regular_file_size(path)
    program = shutil.which("ffmpeg")
    if program is None:
        raise AudioError(
            AudioProblem.UNREADABLE,
            f"{reason} ffmpeg might read it, but is not on the PATH: install it.",
        )
    # Seeking to 0 has an effect: it shifts some formats by the delay of their codec.
    begin = ["-ss", _seconds(offset)] if offset else []
    length = [] if duration is None else ["-t", _seconds(duration)]
    command = [
        # A decoder would have a thread for each core, and memory of its own in each.
        *(program, "-nostdin", "-hide_banner", "-loglevel", "error", "-threads", "1"),
        *("-protocol_whitelist", "file", "-format_whitelist", ",".join(_FORMATS), *begin),
        *("-i", f"file:{os.fspath(path)}", "-map", "0:a:0", "-vn", "-sn", "-dn"),
        *length,
        *("-ac", "1", "-ar", str(sample_rate), "-f", "f32le", "pipe:1"),
    ]
    return _blocks(command, str(path), _BLOCK_S * sample_rate * _BYTES, SAMPLES_PER_BYTE * size)


def _seconds(value: float) -> str:
    """Return seconds as ffmpeg reads them: to a microsecond, and without an exponent."""
    return f"{value:.6f}"


def _blocks(command: list[str], name: str, size: int, most: int) -> Iterator[np.ndarray]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
        )
        assert process.stdout is not None
        _limit_memory(process.pid)
        remaining = most
        try:
            while data := _read(process.stdout, size, name):
                samples = np.frombuffer(data[: len(data) // _BYTES * _BYTES], "<f4")
                if not len(samples):
                    continue
                if not np.isfinite(samples).all():
                    raise AudioError(
                        AudioProblem.NOT_FINITE, f"{name}: a sample is NaN or infinite."
                    )
                remaining -= len(samples)
                if remaining < 0:
                    raise AudioError(
                        AudioProblem.UNREADABLE,
                        f"{name}: ffmpeg gives more than {most} samples, which the file cannot "
                        "hold.",
                    )
                yield samples
            code = process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if code or remaining == most:
            raise AudioError(AudioProblem.UNREADABLE, f"{name}: ffmpeg: {_last_words(log, code)}")


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


def _last_words(log: IO[bytes], code: int) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - 4096))
    lines = log.read().decode("utf-8", "replace").split("\n")
    messages = [line.strip() for line in lines if line.strip()]
    if messages and "not on whitelist" in messages[0]:
        return "not a format that has its audio in the file itself."
    # The first line names the cause, the last only its consequence.
    return _WHO.sub("", messages[0])[:200] if messages else f"no audio (exit code {code})."
