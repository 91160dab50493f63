"""Reads waveforms: mono, float32, at one sample rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import soundfile
import soxr

from effasr.data.audio import embedded
from effasr.data.audio.audio_file import (
    DURATION_TOLERANCE,
    AudioError,
    AudioFile,
    AudioProblem,
    one_line,
    open_audio,
    reason,
)
from effasr.data.audio.cut_sources import check_sources
from effasr.data.audio.embedded import Embedded, TarMember
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr.untrusted.remote import cache_folder, prefetch

if TYPE_CHECKING:
    from lhotse.cut import Cut
    from lhotse.cut.data import DataCut


STATED_SHARE = 0.01
"""Share of a recording's length by which a corpus may state it wrongly, beside the tolerance."""

_BLOCK = 2**20
"""Values that are decoded at a time: a header may claim more than there is, or than fits."""

_LOUDEST = 2.0**31
"""Full scale is 1, but some files have integers as floating point. More overflows the features."""


@dataclass(frozen=True, slots=True)
class AudioHeader:
    """Properties in the header of an audio file."""

    sample_rate: int
    num_samples: int
    channels: int
    tolerance: float  # seconds by which the length may differ from that in a manifest

    @classmethod
    def of(cls, file: AudioFile) -> AudioHeader:
        """Return the header of an open file, after checking that it is complete."""
        file.check_complete()
        return cls(file.samplerate, file.frames, file.channels, file.tolerance)

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return self.num_samples / self.sample_rate


def samples_in(seconds: float, sample_rate: float = SAMPLE_RATE) -> int:
    """Return the number of samples nearest to a duration, for both the planner and the loader."""
    return math.floor(seconds * sample_rate + 0.5)


def read_header(path: str | Path | Embedded) -> AudioHeader:
    """Find out how much a WAV, FLAC, Ogg or MP3 file holds, without decoding it."""
    with open_audio(path) as file:
        return AudioHeader.of(file)


def read_audio(
    path: str | Path | Embedded,
    sample_rate: float = SAMPLE_RATE,
    *,
    offset: float = 0.0,
    duration: float | None = None,
    channels: Sequence[int] | None = None,
    recorded: float = math.inf,
    file: AudioFile | None = None,
) -> np.ndarray:
    """Read a file, or a part of it, as one channel.

    Only the wanted part is decoded. A file of more than ``recorded`` seconds is refused. ``file``
    is the file where it is open already; it is closed.

    Returns:
        float32 (samples,). With a ``duration``, exactly ``samples_in(duration, sample_rate)``.
    """
    with file or open_part(path, offset, duration, recorded) as file:
        rate = file.samplerate
        begin, requested = place(file, path, offset, duration)
        blocks = list(mono_blocks(file, path, begin, requested, channels))
    mono = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    if rate != sample_rate:
        mono = soxr.resample(mono, rate, sample_rate)
    return mono if duration is None else _fit(mono, samples_in(duration, sample_rate))


def open_part(
    path: str | Path | Embedded,
    offset: float = 0.0,
    duration: float | None = None,
    recorded: float = math.inf,
) -> AudioFile:
    """Open a file to read a part of it, which need not be searched where it has the part.

    A file of more than ``recorded`` seconds has changed: it may hold other words, or others there.
    """
    recorded += STATED_SHARE * recorded
    if duration is None:
        return open_audio(path)
    for thorough in (False, True):
        file = open_audio(path, thorough=thorough)
        length = file.frames / file.samplerate
        has_part = offset + duration <= length + file.tolerance
        # Reading says how much of a part is there.
        if (has_part or thorough) and length <= recorded + file.tolerance:
            return file
        file.close()
    raise AudioError(
        AudioProblem.DURATION,
        f"{path}: holds {length:g} s, and its cut was made when it had fewer: run `effasr prepare` "
        "again.",
    )


@dataclass(frozen=True, slots=True)
class AudioSegment:
    """A part of an audio file, to be read as one channel."""

    path: str | Embedded  # The file, or where in another file it is
    start: float  # Seconds
    duration: float  # Seconds
    channels: tuple[int, ...]  # Channels of the file to average, the first of which is 0
    recorded: float = math.inf  # Seconds that the file had, where that is known

    @classmethod
    def of(cls, cut: Cut) -> AudioSegment | None:
        """Return the segment that a lhotse cut is; None if only lhotse can read its audio.

        That is so of in-memory and remote recordings, mixed cuts, channels that the recording
        lacks, and recordings with transforms, but for resampling that keeps what is read.
        """
        from lhotse.cut.data import DataCut

        if not isinstance(cut, DataCut) or cut.recording is None:
            return None
        if not all(map(_keeps_speech, cut.recording.transforms or ())):
            return None
        sources = cut.recording.sources
        if len(sources) != 1 or sources[0].type not in ("file", "shar"):
            return None
        name = str(sources[0].source)
        path = name if sources[0].type == "file" else embedded.parse(name)
        if path is None:
            return None
        # A channel's number is a name: a file of channel 1 alone, as in Shar, has one channel.
        existing, requested = sources[0].channels, _channels(cut)
        if not all(channel in existing for channel in requested):
            return None
        numbers = tuple(map(existing.index, requested))
        return cls(path, cut.start, cut.duration, numbers, cut.recording.duration)


def _keeps_speech(transform: Any) -> bool:
    """Return whether a transform of lhotse is one to a rate of at least the one that is read."""
    rate = getattr(transform, "target_sampling_rate", 0)
    return type(transform).__name__ == "Resample" and rate >= SAMPLE_RATE


def load_audio(
    source: Cut | AudioSegment, sample_rate: float = SAMPLE_RATE, file: AudioFile | None = None
) -> np.ndarray:
    """Return the waveform of a lhotse cut, or of a part of a file, as one channel.

    Files are read with soundfile and soxr; lhotse reads only what has no `AudioSegment`.

    Returns:
        float32 (samples,), exactly ``samples_in(source.duration, sample_rate)``.
    """
    part = source if isinstance(source, AudioSegment) else AudioSegment.of(source)
    if part is not None:
        return read_audio(
            part.path,
            sample_rate,
            offset=part.start,
            duration=part.duration,
            channels=part.channels,
            recorded=part.recorded,
            file=file,
        )
    assert not isinstance(source, AudioSegment)
    _check_channels(source)
    check_sources(source)
    try:
        samples: Any = source.load_audio()
    except Exception as error:  # lhotse raises whatever the storage behind it raises
        message = f"{source.id}: lhotse cannot read the audio: {one_line(error)}"
        raise AudioError(AudioProblem.UNREADABLE, message) from error
    if samples is None or samples.size == 0:
        raise AudioError(AudioProblem.EMPTY, f"{source.id}: the cut holds no audio.")
    mono = samples.mean(axis=0, dtype=np.float32)
    if source.sampling_rate != sample_rate:
        mono = soxr.resample(mono, source.sampling_rate, sample_rate)
    requested = samples_in(source.duration, sample_rate)
    _check_complete(source.id, mono.shape[0], requested, sample_rate, DURATION_TOLERANCE)
    return _fit(mono, requested)


def prefetch_audio(sources: Iterable[Cut | AudioSegment]) -> None:
    """Download remote audio that is read next, all at the same time."""
    if not (cache_folder() / "files").is_dir():
        return
    parts: list[str | tuple[str, int, int]] = []
    for source in sources:
        part = source if isinstance(source, AudioSegment) else AudioSegment.of(source)
        path = None if part is None else part.path
        if isinstance(path, TarMember):
            parts.append((path.path, path.offset, path.offset + path.size))
        elif isinstance(path, str):
            parts.append(path)
    prefetch(parts)


def audio_path(source: Cut | AudioSegment) -> str | None:
    """Return the plain file of a cut or a segment; None if there is no such file."""
    part = source if isinstance(source, AudioSegment) else AudioSegment.of(source)
    return part.path if part is not None and isinstance(part.path, str) else None


def place(
    file: AudioFile, path: str | Path | Embedded, offset: float, duration: float | None
) -> tuple[int, int]:
    """Return the first sample of a part of a file, and how many it has."""
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
    file: AudioFile,
    path: str | Path | Embedded,
    begin: int,
    wanted: int,
    channels: Sequence[int] | None = None,
    values: int = _BLOCK,
    observe: Callable[[np.ndarray], None] | None = None,
) -> Iterator[np.ndarray]:
    """Decode ``wanted`` samples of an open file from ``begin`` on, in blocks of so many ``values``.

    The chosen channels are averaged; all by default. ``observe`` gets them before.
    """
    rate, remaining = file.samplerate, wanted
    longest = max(1, min(values, _BLOCK) // file.channels)
    while remaining:
        first = remaining == wanted
        samples = _read_samples(file, path, begin if first else None, min(remaining, longest))
        if not len(samples):
            break
        remaining -= len(samples)
        chosen = _choose_channels(samples, path, channels)
        if not is_plausible(chosen):
            raise AudioError(
                AudioProblem.NOT_FINITE, f"{path}: a sample is NaN or infinite, or nearly so."
            )
        if observe is not None:
            observe(chosen)
        yield chosen.mean(axis=1, dtype=np.float32) if chosen.shape[1] > 1 else chosen[:, 0]
    if remaining == wanted:
        raise AudioError(AudioProblem.EMPTY, f"{path}: no sample can be read.")
    _check_complete(path, wanted - remaining, wanted, rate, file.tolerance)


def is_plausible(samples: np.ndarray) -> bool:
    """Return whether samples are numbers that features can be computed of: no NaN, none huge."""
    # NaN is neither.
    return not len(samples) or bool(samples.min() >= -_LOUDEST and samples.max() <= _LOUDEST)


def _read_samples(
    file: AudioFile, path: str | Path | Embedded, begin: int | None, wanted: int
) -> np.ndarray:
    try:
        if begin:
            file.seek(begin)
        return file.read(wanted)
    except (soundfile.SoundFileError, OSError) as error:
        raise AudioError(
            AudioProblem.UNREADABLE, f"{path}: the audio is damaged: {reason(error)}"
        ) from error


def _channels(cut: DataCut) -> tuple[int, ...]:
    return (cut.channel,) if isinstance(cut.channel, int) else tuple(cut.channel)


def _check_channels(cut: Cut) -> None:
    """Check that a recording has a cut's channels: of several, lhotse would leave out any."""
    recording = getattr(cut, "recording", None)
    if recording is None or recording.transforms:
        return
    known = [channel for source in recording.sources for channel in source.channels]
    for channel in _channels(cast("DataCut", cut)):
        if channel not in known:
            raise AudioError(
                AudioProblem.UNREADABLE,
                f"{cut.id}: channel {channel} is wanted, but `recording.sources` has "
                f"{', '.join(map(str, known))[:60] or 'none'}.",
            )


def _choose_channels(
    samples: np.ndarray, path: str | Path | Embedded, channels: Sequence[int] | None
) -> np.ndarray:
    if channels is None or list(channels) == list(range(samples.shape[1])):
        return samples
    if max(channels) >= samples.shape[1]:
        raise AudioError(
            AudioProblem.UNREADABLE,
            f"{path}: channel {max(channels)} is wanted, but the file has {samples.shape[1]}.",
        )
    return samples[:, list(channels)]


def _check_complete(
    name: str | Path | Embedded, got: int, wanted: int, rate: float, tolerance: float
) -> None:
    if got < wanted - tolerance * rate:
        raise AudioError(
            AudioProblem.DURATION,
            f"{name}: {wanted / rate:.3f} s are wanted, but only {got / rate:.3f} s can be read.",
        )


def _fit(mono: np.ndarray, length: int) -> np.ndarray:
    """Cut or zero-fill the few samples by which rounding missed ``length``."""
    if mono.shape[0] >= length:
        return np.ascontiguousarray(mono[:length])
    return np.pad(mono, (0, length - mono.shape[0]))


# Speed perturbation: each utterance is trained on at several speeds, as separate copies.
#
# Speech at 0.9 times its speed is longer and lower, as sox and lhotse make it.


def name_at(name: str, speed: float) -> str:
    """Return the name of an utterance at a speed; lhotse gives it the same."""
    return name if speed == 1 else f"{name}_sp{speed}"


def load_at(source: Cut | AudioSegment, speed: float) -> np.ndarray:
    """Return the waveform at a speed: read at another sample rate, and played at the usual one.

    Returns:
        float32 (samples,), exactly ``samples_in(duration_at(source.duration, speed))``.
    """
    return load_audio(source, SAMPLE_RATE / speed)


def duration_at(duration: float, speed: float) -> float:
    """Return an utterance's seconds at a speed; for speeds other than 1, of whole samples."""
    return duration if speed == 1 else samples_in(duration, SAMPLE_RATE / speed) / SAMPLE_RATE
