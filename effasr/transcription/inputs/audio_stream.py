"""Reading of recordings of any length in blocks of a few seconds."""

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr

from effasr.data.audio.audio_file import AudioFile, UnknownFormat, open_audio
from effasr.data.audio.content import ChannelPowers
from effasr.data.audio.embedded import Embedded
from effasr.data.audio.ffmpeg import ffmpeg_blocks, ffmpeg_channels
from effasr.data.audio.waveform import (
    AudioError,
    AudioProblem,
    mono_blocks,
    open_part,
    place,
)

_BLOCK_S = 10
_SHORT_BLOCK_S = 0.1


@dataclass(slots=True)
class AudioStream:
    """Audio that is read once, in order."""

    blocks: Iterator[np.ndarray]  # float32 (samples,) each, mono, at the requested rate
    total: int | None = None  # samples of all blocks together; None if only the end shows it
    warning: str | None = None  # after the last block: why a text of them may be wrong
    partial: str | None = None  # after the last block: why they are not all of the recording


def open_stream(
    path: str | Path | Embedded,
    sample_rate: int,  # rate of the result in Hz
    *,
    offset: float = 0.0,
    duration: float | None = None,
    channels: Sequence[int] | None = None,
    recorded: float = math.inf,  # a file of more seconds is refused
    track: int = 0,
) -> AudioStream:
    """Open a file, or a part of it, as mono; by ffmpeg where soundfile cannot read it."""
    stream = AudioStream(iter(()))
    try:
        if track and not isinstance(path, Embedded):
            raise UnknownFormat(AudioProblem.UNREADABLE, f"{path}: has track {track} by ffmpeg.")
        file = open_part(path, offset, duration, recorded)
    except UnknownFormat as error:
        if isinstance(path, Embedded):
            raise
        stream.blocks = _up_to_damage(
            stream,
            ffmpeg_blocks(path, sample_rate, str(error), offset, duration, track, channels),
            str(path),
        )
        return stream
    try:
        begin, length = place(file, path, offset, duration)
        if duration is None:
            try:
                file.check_complete()
            except AudioError as error:
                stream.partial = _reason(error, str(path))
    except AudioError:
        file.close()
        raise
    rate = file.samplerate
    stream.total = (2 * length * sample_rate + rate) // (2 * rate)
    blocks = _read(stream, file, path, begin, length, channels)
    stream.blocks = _resampled(file, blocks, sample_rate, str(path))
    return stream


def count_channels(path: str, track: int = 0) -> int:
    """Return the number of channels; 1 of a file that cannot be read."""
    with suppress(AudioError):
        with suppress(UnknownFormat):
            if not track:
                with open_audio(path, thorough=False) as file:
                    return file.channels
        return ffmpeg_channels(path, track)
    return 1


def _read(
    stream: AudioStream,
    file: AudioFile,
    path: str | Path | Embedded,
    begin: int,
    length: int,
    channels: Sequence[int] | None,
) -> Iterator[np.ndarray]:
    """Yield the samples of a file; behind damage, those that ffmpeg reads."""
    rate, count, problem, powers = file.samplerate, 0, None, ChannelPowers()
    # A block with an error is lost as a whole: those of the second attempt are short.
    for seconds in (_BLOCK_S, _SHORT_BLOCK_S):
        values = max(1, round(seconds * rate)) * file.channels
        try:
            if problem is not None:
                file.seek(begin + count)
            for block in mono_blocks(
                file, path, begin + count, length - count, channels, values, powers.add
            ):
                count += len(block)
                yield block
            if (loudest := powers.cancelled()) is not None:
                stream.warning = (
                    "the channels are in antiphase, so their mean is nearly silent: choose one by "
                    f"`--channel {loudest}`, or `--per-channel`"
                )
            return
        except (AudioError, soundfile.SoundFileError) as error:
            problem = error if problem is None or isinstance(error, AudioError) else problem
    assert isinstance(problem, AudioError)
    recovered = 0
    if problem.problem == AudioProblem.UNREADABLE and not isinstance(path, Embedded):
        offset, missing = (begin + count) / rate, (length - count) / rate
        # Its messages say no more than what is known already.
        with suppress(AudioError):
            blocks = ffmpeg_blocks(path, rate, "", offset, missing, channels=channels)
            with closing(blocks):
                for block in blocks:
                    recovered += len(block)
                    yield block
    if not count + recovered:
        raise problem
    note = f" ffmpeg reads {recovered / rate:.1f} s after it." if recovered else ""
    stream.partial = stream.partial or _reason(problem, str(path)) + note


def _up_to_damage(
    stream: AudioStream, blocks: Generator[np.ndarray], name: str
) -> Iterator[np.ndarray]:
    is_empty = True
    try:
        with closing(blocks):
            for block in blocks:
                is_empty = False
                yield block
    except AudioError as error:
        if is_empty:
            raise
        stream.partial = _reason(error, name)


def _reason(error: AudioError, name: str) -> str:
    return str(error).removeprefix(f"{name}: ")


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
