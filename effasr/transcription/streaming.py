"""Streaming transcription: raw samples from a pipe, split at pauses."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

import numpy as np
import soxr

from effasr.checks import check, check_positive
from effasr.data.audio.loudness import HOP_SECONDS, is_speech, loudness
from effasr.data.audio.waveform import AudioError, AudioProblem, is_plausible
from effasr.data.prompt import Prompt
from effasr.transcription.inputs.arrival import Interruption, arriving
from effasr.transcription.inputs.chunking import Chunk, quietest
from effasr.transcription.recognizer import Recognizer, Request
from effasr.transcription.results import Failure, Segment

_SAMPLE_TYPES = {"s16le": "<i2", "f32le": "<f4"}
_READ_SECONDS = 0.5
_MARGIN_SECONDS = 0.25  # background that is kept before and after speech
_PAUSE_SECONDS = 0.5  # least pause at which a chunk ends; twice the margin
_MEMORY_SECONDS = 30.0  # past audio whose loudness of background and speech is remembered
_SEARCH_SHARE = 0.5  # without a pause, a chunk ends at the quietest moment of this last part of it
_FEWEST_HOPS = 8  # shorter sounds are clicks


@dataclass(frozen=True, slots=True)
class RawFormat:
    """Samples without a header, channels interleaved."""

    sample_rate: int = 16_000
    channels: int = 1  # number of channels, which are averaged
    # 16-bit integers or 32-bit floating point of full scale 1, little-endian.
    encoding: Literal["s16le", "f32le"] = "s16le"

    def __post_init__(self) -> None:
        rate, encodings = self.sample_rate, ", ".join(_SAMPLE_TYPES)
        check(1_000 <= rate <= 1_000_000, "sample_rate", "be from 1000 to 1000000 Hz", rate)
        check_positive(self, "channels")
        is_supported = self.encoding in _SAMPLE_TYPES
        check(is_supported, "encoding", f"be one of {encodings}", repr(self.encoding))


def raw_blocks(file: BinaryIO, form: RawFormat, sample_rate: int) -> Iterator[np.ndarray]:
    """Read samples to the end of the file: float32 (samples,), mono, at ``sample_rate``."""
    sample = np.dtype(_SAMPLE_TYPES[form.encoding])
    frame = sample.itemsize * form.channels
    size = max(1, int(_READ_SECONDS * form.sample_rate)) * frame
    read = file.read1 if hasattr(file, "read1") else file.read  # type: ignore[attr-defined]
    resampler = None
    if form.sample_rate != sample_rate:
        resampler = soxr.ResampleStream(form.sample_rate, sample_rate, 1, dtype="float32")
    held, begun = b"", False
    while data := read(size):
        held += data
        if not begun and len(held) >= 4:
            begun = True
            if held[:4] in (b"RIFF", b"RF64", b"fLaC", b"OggS"):
                raise AudioError(
                    AudioProblem.UNREADABLE,
                    "the stream must be raw samples, but begins with the header of a file: "
                    "record raw, as `arecord -t raw` and `ffmpeg -f s16le` do.",
                )
        whole = len(held) // frame * frame
        if not whole:
            continue
        block, held = np.frombuffer(held[:whole], sample), held[whole:]
        scale = 1 / 32768 if sample.kind == "i" else 1.0
        mono = block.reshape(-1, form.channels).mean(axis=1, dtype=np.float32) * np.float32(scale)
        if not is_plausible(mono):
            raise AudioError(
                AudioProblem.NOT_FINITE,
                "the stream must be finite, but has NaN or infinity, or nearly so: name the format "
                "of its samples by --encoding.",
            )
        yield from _resampled(resampler, mono)
    yield from _resampled(resampler, np.zeros(0, np.float32), last=True)


def _resampled(
    resampler: soxr.ResampleStream | None, block: np.ndarray, *, last: bool = False
) -> Iterator[np.ndarray]:
    if resampler is not None:
        block = resampler.resample_chunk(block, last=last)
    if len(block):
        yield block


def cut_stream(
    blocks: Iterable[np.ndarray | None],  # float (samples,), mono, as they arrive; None: stalled
    sample_rate: int,
    *,
    latency_seconds: float = 10.0,
) -> Iterator[tuple[Chunk, np.ndarray]]:
    """Split arriving audio at pauses, without silence, by the loudness of the last half minute.

    Where the source is stalled, what is held is cut off as if there were a pause.
    """
    check(latency_seconds >= 1.0, "latency_seconds", "be at least 1", latency_seconds)
    return _cut(blocks, _StreamCutter(sample_rate, latency_seconds))


def _cut(
    blocks: Iterable[np.ndarray | None], cutter: "_StreamCutter"
) -> Iterator[tuple[Chunk, np.ndarray]]:
    # Loudness is that of 10 ms: to look at all that is held for each sample would take too long.
    parts, count = [], 0
    for block in blocks:
        if block is not None:
            parts.append(block)
            count += len(block)
        if block is None or count >= cutter.hop:
            cutter.held, parts, count = np.concatenate([cutter.held, *parts]), [], 0
            yield from cutter.cut(ended=block is None)
    cutter.held = np.concatenate([cutter.held, *parts])
    yield from cutter.cut(ended=True)


class _StreamCutter:
    """The audio that is not yet cut off, and the loudness of the half minute before."""

    def __init__(self, sample_rate: int, latency_seconds: float) -> None:
        self.held = np.zeros(0, np.float32)
        self._start = 0
        self._past = np.zeros(0)
        self._rate = sample_rate
        self.hop = max(1, round(HOP_SECONDS * sample_rate))
        self._longest = int(latency_seconds * sample_rate)
        self._pause = round(_PAUSE_SECONDS / HOP_SECONDS)
        self._margin = round(_MARGIN_SECONDS / HOP_SECONDS)

    def cut(self, *, ended: bool = False) -> Iterator[tuple[Chunk, np.ndarray]]:
        """Cut off every chunk whose end is known; all of them if the stream has ended."""
        while len(speech := self._speech()):
            if (quiet := int(speech[0]) - self._margin) > 0:
                self._take(quiet * self.hop)
                speech -= quiet
            end = self._end(speech, ended)
            if end is None:
                return
            start, samples = self._take(end)
            if np.count_nonzero(speech * self.hop < end) >= _FEWEST_HOPS:
                yield Chunk(start, start + end), samples
        self._take(max(0, len(self.held) - self._margin * self.hop))

    def _speech(self) -> np.ndarray:
        """Return the hops of the held audio that may be speech, int64, ascending."""
        all_levels = np.concatenate([self._past, loudness(self.held, self._rate)])
        if not len(all_levels):
            return np.zeros(0, np.int64)
        # Speech varies in loudness: a steady sound counts as background, however loud it is.
        return np.flatnonzero(is_speech(all_levels, np.inf)[len(self._past) :])

    def _end(self, speech: np.ndarray, ended: bool) -> int | None:
        """Return the number of samples of the first chunk, once its end is known."""
        hops = -(-len(self.held) // self.hop)
        # The end of the held audio bounds a pause, as speech does.
        following = np.append(speech[1:], hops + self._pause if ended else hops)
        pauses = np.flatnonzero(following - speech - 1 >= self._pause)
        end = None
        if len(pauses):
            end = min((int(speech[pauses[0]]) + 1 + self._margin) * self.hop, len(self.held))
        if len(self.held) < self._longest or (end is not None and end <= self._longest):
            return end
        low = int((1 - _SEARCH_SHARE) * self._longest)
        return quietest(self.held, low, self._longest, self._longest, self._rate)

    def _take(self, samples: int) -> tuple[int, np.ndarray]:
        """Cut off the first samples; returns their start and the samples."""
        start, first = self._start, self.held[:samples]
        levels = loudness(first, self._rate) if samples else self._past[:0]
        self._past = np.concatenate([self._past, levels])[-round(_MEMORY_SECONDS / HOP_SECONDS) :]
        self._start, self.held = start + samples, self.held[samples:]
        return start, first


def transcribe_stream(
    recognizer: Recognizer,
    blocks: Iterable[np.ndarray],
    prompt: Prompt,
    *,
    latency_seconds: float = 10.0,
    interruption: Interruption | None = None,
) -> Iterator[Segment]:
    """Transcribe blocks, float32 (samples,), that a thread reads; yields segments at pauses."""
    recognizer.prompt(prompt)
    blocks_or_stalls = arriving(blocks, interruption)
    chunks = cut_stream(blocks_or_stalls, recognizer.sample_rate, latency_seconds=latency_seconds)
    return _transcribed(recognizer, chunks, prompt)


def _transcribed(
    recognizer: Recognizer, chunks: Iterable[tuple[Chunk, np.ndarray]], prompt: Prompt
) -> Iterator[Segment]:
    rate = recognizer.sample_rate
    for chunk, samples in chunks:
        request = Request("stream", lambda samples=samples: samples, prompt)
        for result in recognizer.results([request]):
            if isinstance(result, Failure):
                raise ValueError(result.reason)
            for segment in result.segments:
                if segment.text:
                    yield segment.later(chunk.start / rate)
