"""Recordings during transcription, with their chunks and results."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from effasr.data.prompt import WITHOUT_SPACES, Prompt
from effasr.decoding.decoded import Score
from effasr.transcription.inputs.audio_stream import AudioStream
from effasr.transcription.inputs.chunking import Chunk
from effasr.transcription.inputs.prefetch import prefetch
from effasr.transcription.results import (
    INTERRUPTED,
    Alternative,
    Failure,
    Fallback,
    Result,
    Segment,
    Transcription,
    WordConfidence,
)
from effasr.transcription.word_timestamps import Word

# Chunks of each recording that are loaded ahead; more of a long one are read when needed.
FIRST_CHUNKS = 2

_AHEAD = 4  # chunks that are read while others are decoded


@dataclass(frozen=True, slots=True)
class Request:
    id: str
    # Returns mono audio at the model's sample rate, float32 (samples,) or a stream; runs on a
    # thread. Its exceptions are failures of this recording only.
    load: Callable[[], np.ndarray | AudioStream]
    prompt: Prompt  # languages and task
    channel: int | None = None  # channel that is transcribed alone


@dataclass(slots=True)
class Piece:
    """A chunk of a recording, with its text once it is decoded."""

    recording: "OpenRecording"
    chunk: Chunk
    audio: np.ndarray
    frames: int
    text: str = ""
    truncated: bool = False
    words: tuple[Word, ...] | None = ()
    score: Score | None = None
    alternatives: tuple[Alternative, ...] = ()
    word_confidences: tuple[WordConfidence, ...] | None = ()
    segments: tuple[Segment, ...] = ()  # what timestamps divide the text into
    fallback: Fallback | None = None
    decoded: bool = False

    def as_segments(self) -> tuple[Segment, ...]:
        if self.segments:
            return self.segments
        rate, channel = self.recording.sample_rate, self.recording.request.channel
        whole = Segment(
            self.chunk.start / rate,
            self.chunk.end / rate,
            self.text,
            self.truncated,
            self.words,
            self.score,
            self.alternatives,
            self.word_confidences,
            channel=channel,
            fallback=self.fallback,
        )
        return (whole,)


@dataclass(slots=True)
class OpenRecording:
    """A request, and the part of its audio that has been read."""

    request: Request
    sample_rate: int
    vad: str  # name of the voice activity detector
    duration: float = 0.0  # seconds, so far
    prompt: list[int] = field(default_factory=list)  # tokens that the decoder reads first
    language: str | None = None  # what is spoken, where the request asks for it
    pieces: list[Piece] = field(default_factory=list)  # chunks read so far
    failure: str | None = None  # why there is no transcript; None otherwise
    partial: str | None = None  # why the transcript is not that of the whole recording
    warning: str | None = None
    first: list[Piece] = field(default_factory=list)  # chunks that were read ahead
    coming: Iterator[Piece] = field(default_factory=lambda: iter(()))  # the other chunks
    read: bool = False  # whether all chunks have been read
    # Of sequential decoding: the tokens of earlier windows, and the samples of the last window
    # after which the next one begins.
    context: list[int] = field(default_factory=list)
    advance: int = 0

    @property
    def finished(self) -> bool:
        return self.read and (self.failure is not None or all(p.decoded for p in self.pieces))

    def measuring(self, blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield blocks of samples and add up the duration."""
        samples = 0
        for block in blocks:
            samples += len(block)
            self.duration = samples / self.sample_rate
            yield block

    def arriving(self) -> Iterator[Piece]:
        """Yield its pieces as they are read; a separate thread reads all but the first ones."""
        for piece in self.first:
            self.pieces.append(piece)
            yield piece
        if len(self.first) == FIRST_CHUNKS:
            following = partial(next, self.coming, None)
            chunks = prefetch(lambda _: following(), itertools.count(), workers=1, ahead=_AHEAD)
            while self.failure is None and (piece := next(chunks)) is not None:
                self.pieces.append(piece)
                yield piece
            chunks.close()
        self.first, self.read = [], True

    def result(self) -> Result:
        if self.failure is not None:
            return Failure(self.request.id, self.failure)
        segments = tuple(segment for piece in self.pieces for segment in piece.as_segments())
        prompt = self.request.prompt
        space = "" if prompt.target in WITHOUT_SPACES else " "
        return Transcription(
            self.request.id,
            self.duration,
            space.join(segment.text for segment in segments if segment.text),
            segments,
            space,
            prompt,
            self.partial,
            vad=self.vad,
            warning=self.warning,
            language=self.language,
        )


def take_interrupted(recordings: deque[OpenRecording]) -> Iterator[Result]:
    """Yield the transcripts of what is decoded, from the beginning of each recording on."""
    for recording in recordings:
        if recording.failure is None and not recording.finished:
            recording.pieces = list(itertools.takewhile(lambda p: p.decoded, recording.pieces))
            recording.partial = INTERRUPTED
            if recording.pieces:
                recording.duration = recording.pieces[-1].chunk.end / recording.sample_rate
        if recording.pieces and recording.failure is None:
            yield recording.result()


def take_finished(recordings: deque[OpenRecording]) -> Iterator[Result]:
    while recordings and recordings[0].finished:
        yield recordings.popleft().result()
