"""Segments of a stream: where they end, and what they hold."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

from effasr.data.audio.loudness import is_speech
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.confidence.calibration import ConfidenceCalibration
from effasr.decoding.confidence.tokens import StreamConfidences
from effasr.decoding.hypothesis import Hypothesis
from effasr.decoding.streams import BeamStreams, Emitted, OpenTranscript
from effasr.model.asr import ASRModel
from effasr.transcription.inputs.vad import StreamLoudness
from effasr.transcription.results import Alternative, Segment, WordConfidence, word_confidences
from effasr.transcription.word_timestamps import Word, word_timestamps

_BEFORE_SECONDS = 1.0  # loudness that is kept before a segment, to find the start of its first word

_SHORT_SAMPLES = 1 << 16


class HeldSamples:
    """Samples of a stream, which are numbered from its beginning."""

    def __init__(self) -> None:
        self.begin = self.end = 0
        self._parts: list[np.ndarray] = []

    def append(self, samples: np.ndarray) -> None:
        if len(samples):
            self._parts.append(samples.astype(np.float32))
            self.end += len(samples)

    def between(self, first: int, last: int) -> np.ndarray:
        """Return the samples from one to before another, float32, or to the end if it is sooner."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0][first - self.begin : last - self.begin]

    def forget(self, before: int) -> None:
        if self._parts:
            samples = self.between(before, self.end)
            # A view keeps its whole array alive, but a long one is not copied for each chunk.
            whole = samples if samples.base is None else samples.base
            is_short = samples.size <= max(whole.size // 2, _SHORT_SAMPLES)
            self._parts = [samples.copy() if is_short else samples]
        self.begin = before

    def clear(self) -> None:
        self._parts, self.begin = [], self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOptions:
    """Where segments end, and what they hold; see `OnlineRecognizer` for those not listed."""

    tokenizer: Tokenizer
    method: str  # the search, ``transducer`` or ``ctc``
    sample_rate: int
    frame_samples: int  # samples of an encoder frame
    frame_seconds: float  # its duration
    endpoint_seconds: float | None
    longest_seconds: float | None
    nbest: int | None
    words: bool
    word_confidence: bool
    calibration: ConfidenceCalibration | None
    spaces: bool


class StreamSegments:
    """Segments of one stream, of which the last is open."""

    def __init__(
        self,
        options: SegmentOptions,
        model: ASRModel,
        audio: HeldSamples,
        search: BeamStreams | None,
        slot: int,
    ):
        self.frames = 0
        self.tokens: list[tuple[int, int]] = []
        self._options, self._audio, self._search, self._slot = options, audio, search, slot
        self._final: deque[Segment] = deque()
        self._loudness: StreamLoudness | None = None
        if options.words:
            self._loudness = StreamLoudness(options.sample_rate, options.frame_seconds)
        self._confidences: StreamConfidences | None = None
        if options.word_confidence:
            self._confidences = StreamConfidences(model, options.method)
        # What comes before this frame is final.
        self._since = 0

    @property
    def _seconds(self) -> float:
        return self._audio.end / self._options.sample_rate

    def take(self) -> list[Segment]:
        segments = list(self._final)
        self._final.clear()
        return segments

    def add(self, emitted: Sequence[Emitted] | OpenTranscript, encoded: Tensor) -> None:
        """Add what the search has found in a chunk, and end segments."""
        if self._loudness is not None:
            size = self._options.frame_samples
            first, last = self.frames * size, (self.frames + len(encoded)) * size
            self._loudness.add(self._audio.between(first, last), len(encoded))
        if self._confidences is not None:
            self._confidences.add(encoded)
        if isinstance(emitted, OpenTranscript):
            self.frames += len(encoded)
            self.take_open(emitted)
        else:
            self.tokens += [(token, self.frames + frame) for token, frame in emitted]
            self.frames += len(encoded)
            self._end_segments(self.frames)
        if not self.tokens:
            # A beam may still find that a segment has begun.
            before = self.frames - round(_BEFORE_SECONDS / self._options.frame_seconds)
            if isinstance(emitted, OpenTranscript):
                before = min(before, self._since)
            if self._loudness is not None:
                self._loudness.forget(before)
            if self._confidences is not None:
                self._confidences.forget(before)

    def take_open(self, transcript: OpenTranscript) -> None:
        """Take the open transcript of a beam, and end segments."""
        self.tokens = list(zip(transcript.tokens, transcript.frames, strict=True))
        self._end_segments(transcript.read)

    def end(self) -> None:
        self._end_segment(len(self.tokens), self.frames)

    def text(self, tokens: Sequence[int]) -> str:
        return self._options.tokenizer.decode(list(tokens)).strip()

    def _end_segments(self, read: int) -> None:
        while (end := self._next_end(read)) is not None:
            self._end_segment(*end)

    def _next_end(self, read: int) -> tuple[int, int, bool] | None:
        """Return where the next segment ends, if it does."""
        pause, seconds = self._options.endpoint_seconds, self._options.frame_seconds
        most = None if pause is None else pause / seconds
        frames = [frame for _, frame in self.tokens]
        for count, (before, frame) in enumerate(pairwise(frames), 1):
            if most is not None and frame - before - 1 >= most:
                return count, frame, False
            if self._is_long(count):
                return count, frame, True
        if most is None or (frames and read - frames[-1] - 1 < most):
            return None
        silent = max(int(read - most), frames[-1] + 1 if frames else 0)
        # Without tokens, a beam begins anew: what it has read counts no more.
        if not frames and (silent <= self._since or self._search is None):
            return None
        return len(frames), silent, False

    def _is_long(self, count: int) -> bool:
        """Whether the segment is to end after so many tokens, as with the next it is too long."""
        longest = self._options.longest_seconds
        if longest is None:
            return False
        length = (self.tokens[count][1] + 1 - self.tokens[0][1]) * self._options.frame_seconds
        if length <= longest:
            return False
        tokens = [token for token, _ in self.tokens]
        text, longer = (self.text(tokens[:end]) for end in (count, count + 1))
        begins = not self._options.spaces or len(longer.split()) > len(text.split())
        return begins or length > 2 * longest

    def _end_segment(self, count: int, since: int, goes_on: bool = False) -> None:
        """End a segment after its tokens, before a frame, with speech going on or not."""
        of = self._options
        tokens, remaining = self.tokens[:count], self.tokens[count:]
        listed: list[Hypothesis] = []
        if self._search is not None:
            listed = self._search.commit(self._slot, count, since)
            following = self._search.transcript(self._slot)
            remaining = list(zip(following.tokens, following.frames, strict=True))
        self._since = since
        if tokens:
            start = tokens[0][1] * of.frame_seconds
            end = min((tokens[-1][1] + 1) * of.frame_seconds, max(self._seconds, start))
            self._final.append(
                Segment(
                    start,
                    end,
                    self.text([token for token, _ in tokens]),
                    words=self._words(tokens, goes_on),
                    alternatives=tuple(
                        Alternative(self.text(other.tokens), other.score, other.rank)
                        for other in listed[: of.nbest or 0]
                    ),
                    word_confidences=self._word_confidences(tokens, since, goes_on),
                )
            )
        self.tokens = remaining

    def _words(self, tokens: Sequence[tuple[int, int]], goes_on: bool) -> tuple[Word, ...]:
        if self._loudness is None:
            return ()
        first, last, of = self._loudness.first, tokens[-1][1], self._options
        timed = word_timestamps(
            [token for token, _ in tokens],
            [(frame - first, frame - first + 1) for _, frame in tokens],
            of.tokenizer.decode,
            frame_seconds=of.frame_seconds,
            speech=is_speech(self._loudness.levels),
            offset=first * of.frame_seconds,
            # The next word may start at the last frame. Else that may extend beyond the audio, as
            # the number of frames is rounded up.
            until=last * of.frame_seconds if goes_on else self._seconds,
            spaces=of.spaces,
        )
        # The last frame stays for the next segment, which a transducer may begin at the same frame.
        self._loudness.forget(last)
        return tuple(timed)

    def _word_confidences(
        self, tokens: Sequence[tuple[int, int]], since: int, goes_on: bool
    ) -> tuple[WordConfidence, ...] | None:
        if self._confidences is None:
            return ()
        of, texts = self._options, [token for token, _ in tokens]
        # A transducer may say labels of both segments at the same frame.
        end = since + 1 if goes_on and of.method == "transducer" else since
        confidences = self._confidences.of_segment(texts, end)
        self._confidences.forget(since)
        if confidences is None:
            return None
        return word_confidences(
            texts, confidences, of.tokenizer.decode, spaces=of.spaces, calibration=of.calibration
        )
