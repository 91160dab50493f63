"""Reading of recordings of any length in blocks of a few seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soxr

from effasr.data.audio.audio_file import AudioFile, UnknownFormat
from effasr.data.audio.ffmpeg import ffmpeg_blocks
from effasr.data.audio.waveform import (
    AudioError,
    AudioProblem,
    TarMember,
    mono_blocks,
    open_part,
    place,
)

_BLOCK_S = 10


@dataclass(frozen=True, slots=True)
class AudioStream:
    """Audio that is read once, in order."""

    blocks: Iterator[np.ndarray]  # float32 (samples,) each, mono, at the requested rate
    total: int | None = None  # samples of all blocks together; None if only the end shows it


def open_stream(
    path: str | Path | TarMember,
    sample_rate: int,  # rate of the result in Hz
    *,
    offset: float = 0.0,
    duration: float | None = None,
    channels: Sequence[int] | None = None,
    track: int = 0,
) -> AudioStream:
    """Open a file, or a part of it, as mono; by ffmpeg where soundfile cannot read it."""
    try:
        if track and not isinstance(path, TarMember):
            raise UnknownFormat(AudioProblem.UNREADABLE, f"{path}: has track {track} by ffmpeg.")
        file = open_part(path, offset, duration)
    except UnknownFormat as error:
        if isinstance(path, TarMember) or channels is not None:
            raise
        blocks = ffmpeg_blocks(path, sample_rate, str(error), offset, duration, track)
        return AudioStream(blocks)
    try:
        if duration is None:
            file.check_complete()
        begin, length = place(file, path, offset, duration)
    except AudioError:
        file.close()
        raise
    rate = file.samplerate
    total = (2 * length * sample_rate + rate) // (2 * rate)
    values = _BLOCK_S * rate * file.channels
    blocks = mono_blocks(file, path, begin, length, channels, values)
    return AudioStream(_resampled(file, blocks, sample_rate, str(path)), total)


def _resampled(
    file: AudioFile, blocks: Iterator[np.ndarray], sample_rate: int, name: str
) -> Iterator[np.ndarray]:
    with closing(file):
        if file.samplerate == sample_rate:
            yield from blocks
            return
        resampler = soxr.ResampleStream(file.samplerate, sample_rate, 1, dtype="float32")
        count, block = 0, next(blocks)
        while block is not None:
            following = next(blocks, None)
            samples = resampler.resample_chunk(block, last=following is None)
            if len(samples):
                count += len(samples)
                yield samples
            block = following
    if not count:
        raise AudioError(
            AudioProblem.EMPTY, f"{name}: shorter than one sample at {sample_rate} Hz."
        )
