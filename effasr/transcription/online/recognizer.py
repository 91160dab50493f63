"""The recognizer of streams, and a stream of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from effasr.data.audio.waveform import is_plausible
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.confidence.calibration import Calibration
from effasr.decoding.confidence.streaming import StreamConfidences
from effasr.decoding.config import LM_WEIGHT
from effasr.decoding.ctc_beam import Fusion
from effasr.decoding.lm.ngram import TokenLM
from effasr.decoding.nbest.hypothesis import Hypothesis
from effasr.decoding.streaming.beam import BeamStreams, OpenTranscript
from effasr.decoding.streaming.emitted import Emitted
from effasr.model.asr import ASRModel
from effasr.model.checks import check
from effasr.model.streaming_encoder import StreamingEncoder
from effasr.nn.parameters.evaluating import evaluating
from effasr.transcription.inputs.stream_loudness import StreamLoudness
from effasr.transcription.inputs.vad import is_speech
from effasr.transcription.online.search import check_beam, stream_search
from effasr.transcription.online.streamable import check_model, stream_contexts
from effasr.transcription.results import (
    Alternative,
    Segment,
    WordConfidence,
    word_confidences,
)
from effasr.transcription.word_timestamps import Word, word_timestamps
from effasr_kernels import Context, PackedLayout, PackedSequence

Method = Literal["auto", "transducer", "ctc"]

_SHORT_SAMPLES = 1 << 16
_BEFORE_SECONDS = 1.0
"""Loudness that is kept before a segment, to find the start of its first word."""


class OnlineRecognizer:
    """Transcribes streams while they arrive, several at a time in one batch.

    The encoder and the search keep a state of constant size for each stream, and segments have a
    longest length, so that the work and the memory of a stream do not grow with its length. The
    tokens are those of `Recognizer` with the same context on the whole recording, if it decodes it
    as one chunk, whatever pieces the audio comes in. With a beam this holds for the first segment;
    what a segment has made final does not change, and the following ones continue from it.

        recognizer = OnlineRecognizer(model, tokenizer)
        stream = recognizer.open()
        for samples in microphone:
            stream.feed(samples)
            recognizer.decode()
            print(stream.text)
        stream.finish()
        recognizer.decode()
    """

    def __init__(
        self,
        model: ASRModel,
        tokenizer: Tokenizer,
        *,
        context: Context | None = None,
        streams: int = 1,
        method: Method = "auto",
        max_symbols: int = 10,
        beam: int = 1,
        nbest: int | None = None,
        lm: TokenLM | None = None,
        lm_weight: float = LM_WEIGHT,
        endpoint_seconds: float | None = 1.2,
        longest_seconds: float | None = 30.0,
        words: bool = False,
        word_confidence: bool = False,
        calibration: Calibration | None = None,
        spaces: bool = True,
    ):
        """Prepare the states of a number of streams.

        Args:
            model: A FastConformer with causal convolutions and features without normalisation, and
                a transducer or a CTC head; its weights must not change from now on.
            tokenizer: Tokenizer of the model.
            context: Context of the encoder, one that it is trained with; by default the first that
                waits for no later frames.
            streams: Most streams that are open at a time; a batch always has this size.
            method: Search; by default the transducer's, if there is one, else that of CTC.
            max_symbols: Most labels of a frame in the greedy search of a transducer.
            beam: Hypotheses of each stream; 1 for greedy search.
            nbest: Hypotheses of each segment to report with their scores, from 1 to ``beam``, which
                is at least 2 then; None for none.
            lm: Language model for shallow fusion with a CTC beam, which reads each segment as a
                text of its own; None for none.
            lm_weight: Factor of its log-probability, above 0.
            endpoint_seconds: Time without a token that ends a segment; None to end none by it.
            longest_seconds: A segment ends before the first word that begins so long after its
                first token, and wherever it is twice as long; None for segments of any length.
            words: Whether segments have the times of their words, of the frames at which the search
                emits their tokens, and of the pauses in the audio.
            word_confidence: Whether segments have the confidences of their words: see
                `effasr.decoding.confidence.tokens`.
            calibration: Makes probabilities of these; None for the raw values.
            spaces: Whether spaces separate words; else each character is one.

        Raises:
            ValueError: The model looks ahead or has neither output, or an option is out of range
                or has no effect.
        """
        contexts = stream_contexts(model)[:1] if context is None else [context]
        self.method = check_model(model, method, contexts)
        self.context = contexts[0]
        check(max_symbols >= 1, "max_symbols", "be at least 1", max_symbols)
        check_beam(self.method, beam, nbest, lm, lm_weight)
        check(
            calibration is None or word_confidence,
            "calibration",
            "be left out without `word_confidence`",
            calibration,
        )
        if endpoint_seconds is not None:
            check(endpoint_seconds > 0, "endpoint_seconds", "be above 0", endpoint_seconds)
        if longest_seconds is not None:
            check(longest_seconds > 0, "longest_seconds", "be above 0", longest_seconds)
        self.model, self.tokenizer = model, tokenizer
        features = model.config.features
        self.sample_rate, self.frame_seconds = features.sample_rate, features.framing.seconds
        self.endpoint_seconds, self.longest_seconds = endpoint_seconds, longest_seconds
        self.nbest, self.words, self.spaces = nbest, words, spaces
        self.word_confidence, self.calibration = word_confidence, calibration
        self._hop, self._factor = features.hop, features.rows_per_frame
        self._framing = features.framing
        # Samples that a window reaches beyond the beginning of its hop.
        self._window = features.window // 2 + 1
        with evaluating(model):
            self._encoder = StreamingEncoder(
                model.encoder,  # type: ignore[arg-type]
                features.mel_bins,
                streams,
                self.context,
            )
            self._search = stream_search(
                model,
                self.method,
                streams,
                max_symbols=max_symbols,
                beam=beam,
                nbest=nbest or 1,
                fusion=None if lm is None else Fusion(lm, lm_weight),
            )
        self._open: list[OnlineStream | None] = [None] * streams

    @property
    def latency_seconds(self) -> float:
        """Length of a chunk: the longest time from a sound to the step that decodes it."""
        return self.context.chunk * self.frame_seconds

    def open(self) -> OnlineStream:
        """Begin a stream.

        Raises:
            ValueError: As many streams are open as the recognizer was made for.
        """
        if None not in self._open:
            raise ValueError(
                f"`streams` must be more than {len(self._open)} to open another one: finish and "
                "decode one, or make the recognizer for more."
            )
        slot = self._open.index(None)
        self._encoder.start(slot)
        self._search.start(slot)
        stream = self._open[slot] = OnlineStream(self, slot)
        return stream

    def decode(self) -> int:
        """Decode all chunks that are complete, of all streams; return how many."""
        count = 0
        while chunks := self._chunks():
            with evaluating(self.model):
                self._step(chunks)
            count += len(chunks)
        return count

    def _chunks(self) -> dict[int, np.ndarray]:
        """The samples of the next chunk of each stream that has one, by slot."""
        found = {}
        for slot, stream in enumerate(self._open):
            if stream is None:
                continue
            samples = stream._next(stream.samples_needed)
            if samples is not None:
                found[slot] = samples
            elif stream.finished:
                self._close(slot, stream)
        return found

    def _close(self, slot: int, stream: OnlineStream) -> None:
        if isinstance(self._search, BeamStreams):
            with evaluating(self.model):
                stream._take_open(self._search.finish(slot))
        with evaluating(self.model):
            stream._end()
        self._open[slot] = None

    def _step(self, chunks: dict[int, np.ndarray]) -> None:
        rows, mel = self._features(chunks)
        frames = [0] * len(self._open)
        for slot in chunks:
            stream = self._open[slot]
            assert stream is not None
            frames[slot] = min(self.context.chunk, stream._left())
        encoded = self._encoder.step(mel, rows, frames)
        for slot, found in enumerate(self._search.step(encoded, frames)):
            stream = self._open[slot]
            if stream is not None and frames[slot]:
                stream._add(found, encoded[slot, : frames[slot]])
                if stream._drop(self._factor * self._hop * max(0, stream.frames - 1)):
                    self._close(slot, stream)

    @torch.inference_mode()
    def _features(self, chunks: dict[int, np.ndarray]) -> tuple[list[int], Tensor]:
        """Mel rows of the chunks: the number of each slot, and float32 (S, s c, mel_bins).

        The samples of all but a first chunk begin one frame before it, for a window to reach back.
        """
        config, device = self.model.config.features, next(self.model.parameters()).device
        size, slots = self._factor * self.context.chunk, len(self._open)
        mel = torch.zeros(slots, size, config.mel_bins, device=device)
        rows = [0] * slots
        lengths = [len(samples) for samples in chunks.values()]
        audio = torch.from_numpy(np.concatenate(list(chunks.values()))).to(device)
        layout = PackedLayout.from_lengths(lengths, device)
        frames = PackedLayout.from_lengths([config.encoder_frames(n) for n in lengths], device)
        found = self.model.features(PackedSequence(audio, layout), frames).values
        for slot, length, begin in zip(chunks, lengths, frames.cu_seqlens_host, strict=False):
            stream = self._open[slot]
            assert stream is not None
            before = self._factor if stream.frames else 0
            # Causal subsampling may leave a frame for a chunk without rows of its own.
            rows[slot] = count = min(size, max(0, length // self._hop - before))
            first = begin * self._factor + before
            mel[slot, :count] = found[first : first + count]
        return rows, mel


class OnlineStream:
    """A stream that an `OnlineRecognizer` transcribes; see there.

    Attributes:
        recognizer: The recognizer, whose `OnlineRecognizer.decode` decodes what is fed.
        finished: Whether `finish` was called.
        done: Whether all of it is decoded, after `finish`.
        frames: Encoder frames that are decoded.
    """

    def __init__(self, recognizer: OnlineRecognizer, slot: int):
        """Called by `OnlineRecognizer.open`."""
        self.recognizer, self._slot = recognizer, slot
        self.finished = self.done = False
        self.frames = 0
        self._parts: list[np.ndarray] = []
        self._begin = self._end_sample = 0
        self._tokens: list[tuple[int, int]] = []
        self._segments: deque[Segment] = deque()
        self._loudness: StreamLoudness | None = None
        if recognizer.words:
            self._loudness = StreamLoudness(recognizer.sample_rate, recognizer.frame_seconds)
        self._confidences: StreamConfidences | None = None
        if recognizer.word_confidence:
            self._confidences = StreamConfidences(recognizer.model, recognizer.method)
        # What comes before this frame is final.
        self._since = 0

    def feed(self, samples: np.ndarray) -> None:
        """Add samples, any number; they are decoded by `OnlineRecognizer.decode`.

        Args:
            samples: Floating (samples,), mono, of the recognizer's rate.

        Raises:
            ValueError: The stream is finished, or the samples are not mono or not finite; the
                stream then goes on without them.
        """
        if self.finished:
            raise ValueError("`samples` must come before `finish`, but the stream is finished.")
        samples = np.asarray(samples)
        if samples.ndim != 1 or samples.dtype.kind != "f":
            raise ValueError(
                "`samples` must be floating numbers (samples,), but are "
                f"{samples.dtype} {samples.shape}: divide 16-bit integers by 32768."
            )
        if not is_plausible(samples):
            raise ValueError("`samples` must be finite, but have NaN or infinity, or nearly so.")
        if len(samples):
            self._parts.append(samples.astype(np.float32))
            self._end_sample += len(samples)

    def finish(self) -> None:
        """End the stream: `OnlineRecognizer.decode` decodes the rest, and frees its place."""
        self.finished = True

    @property
    def seconds(self) -> float:
        """Seconds of audio so far."""
        return self._end_sample / self.recognizer.sample_rate

    @property
    def samples_needed(self) -> int:
        """Samples from the beginning of the stream that its next chunk needs, if more follow."""
        of = self.recognizer
        rows = of._factor * (self.frames + of.context.chunk)
        return max(of._hop * rows, of._hop * (rows - 1) + of._window)

    @property
    def tokens(self) -> list[int]:
        """Tokens of the segment that is not yet final."""
        return [token for token, _ in self._tokens]

    @property
    def text(self) -> str:
        """Text of the segment that is not yet final: a partial result.

        In greedy search it only grows. With a beam it is that of the likeliest hypothesis.
        """
        return self._text(self.tokens)

    def take(self) -> list[Segment]:
        """Return the final segments since the last call, in order."""
        taken = list(self._segments)
        self._segments.clear()
        return taken

    def _next(self, needed: int) -> np.ndarray | None:
        """The held samples up to ``needed``, or to the end of a finished stream; None to wait."""
        if self._end_sample < needed and not (self.finished and self._left()):
            return None
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0][: needed - self._begin]

    def _drop(self, sample: int) -> bool:
        """Forget the samples before one; returns whether nothing is left to decode."""
        if self._parts:
            rest = self._parts[0][sample - self._begin :]
            # A view keeps its whole array alive, but a long rest is not copied for each chunk.
            whole = rest if rest.base is None else rest.base
            is_short = rest.size <= max(whole.size // 2, _SHORT_SAMPLES)
            self._parts = [rest.copy() if is_short else rest]
        self._begin = sample
        return self.finished and not self._left()

    def _left(self) -> int:
        """Frames of the samples so far that are not decoded; more than a chunk while more come."""
        most = self.recognizer._framing.frames(self._end_sample) - self.frames
        return most if self.finished else max(most, self.recognizer.context.chunk)

    def _add(self, found: Sequence[Emitted] | OpenTranscript, encoded: Tensor) -> None:
        """Add what the search has found in a chunk, and end segments.

        Args:
            found: The new tokens, or with a beam all of the open segment.
            encoded: Frames of the chunk, (frames, encoder width).
        """
        self._listen(len(encoded))
        if self._confidences is not None:
            self._confidences.add(encoded)
        if isinstance(found, OpenTranscript):
            self.frames += len(encoded)
            self._take_open(found)
        else:
            self._tokens += [(one.token, self.frames + one.frame) for one in found]
            self.frames += len(encoded)
            self._end_segments(self.frames)
        if not self._tokens:
            # A beam may still find that a segment has begun.
            before = self.frames - round(_BEFORE_SECONDS / self.recognizer.frame_seconds)
            if isinstance(found, OpenTranscript):
                before = min(before, self._since)
            if self._loudness is not None:
                self._loudness.forget(before)
            if self._confidences is not None:
                self._confidences.forget(before)

    def _take_open(self, found: OpenTranscript) -> None:
        """Take the open transcript of a beam, and end segments."""
        self._tokens = list(zip(found.tokens, found.frames, strict=True))
        self._end_segments(found.read)

    def _end_segments(self, read: int) -> None:
        """End the segments that are complete, after so many frames are searched."""
        while (end := self._next_end(read)) is not None:
            self._end_segment(*end)

    def _next_end(self, read: int) -> tuple[int, int, bool] | None:
        """Return where the next segment ends, if it does.

        Returns:
            Its tokens, its frames, and whether speech goes on without a pause.
        """
        pause, seconds = self.recognizer.endpoint_seconds, self.recognizer.frame_seconds
        most = None if pause is None else pause / seconds
        frames = [frame for _, frame in self._tokens]
        for count, (before, frame) in enumerate(pairwise(frames), 1):
            if most is not None and frame - before - 1 >= most:
                return count, frame, False
            if self._is_long(count):
                return count, frame, True
        if most is None or (frames and read - frames[-1] - 1 < most):
            return None
        silent = max(int(read - most), frames[-1] + 1 if frames else 0)
        # Without tokens, a beam begins anew: what it has read counts no more.
        if not frames and (silent <= self._since or not self._has_beam):
            return None
        return len(frames), silent, False

    @property
    def _has_beam(self) -> bool:
        return isinstance(self.recognizer._search, BeamStreams)

    def _listen(self, frames: int) -> None:
        """Measure the loudness of the next frames."""
        if self._loudness is not None:
            size = self.recognizer._factor * self.recognizer._hop
            first = self.frames * size - self._begin
            self._loudness.add(self._parts[0][first : first + frames * size], frames)

    def _is_long(self, count: int) -> bool:
        """Whether the segment is to end after so many tokens, as with the next it is too long."""
        longest = self.recognizer.longest_seconds
        if longest is None:
            return False
        length = (self._tokens[count][1] + 1 - self._tokens[0][1]) * self.recognizer.frame_seconds
        if length <= longest:
            return False
        text, longer = (self._text(self.tokens[:end]) for end in (count, count + 1))
        begins = not self.recognizer.spaces or len(longer.split()) > len(text.split())
        return begins or length > 2 * longest

    def _text(self, tokens: Sequence[int]) -> str:
        return self.recognizer.tokenizer.decode(list(tokens)).strip()

    def _end_segment(self, count: int, since: int, goes_on: bool = False) -> None:
        """End a segment after its tokens, before a frame, with speech going on or not."""
        of = self.recognizer
        tokens, rest = self._tokens[:count], self._tokens[count:]
        listed: list[Hypothesis] = []
        if isinstance(of._search, BeamStreams):
            listed = of._search.commit(self._slot, count, since)
            found = of._search.transcript(self._slot)
            rest = list(zip(found.tokens, found.frames, strict=True))
        self._since = since
        if tokens:
            start = tokens[0][1] * of.frame_seconds
            end = min((tokens[-1][1] + 1) * of.frame_seconds, max(self.seconds, start))
            self._segments.append(
                Segment(
                    start,
                    end,
                    self._text([token for token, _ in tokens]),
                    words=self._words(tokens, goes_on),
                    alternatives=tuple(
                        Alternative(self._text(one.tokens), one.score, one.rank)
                        for one in listed[: of.nbest or 0]
                    ),
                    word_confidences=self._word_confidences(tokens, since, goes_on),
                )
            )
        self._tokens = rest

    def _words(self, tokens: Sequence[tuple[int, int]], goes_on: bool) -> tuple[Word, ...]:
        """The words of a segment with their times, if they are wanted."""
        if self._loudness is None:
            return ()
        first, of = self._loudness.first, self.recognizer
        found = word_timestamps(
            [token for token, _ in tokens],
            [(frame - first, frame - first + 1) for _, frame in tokens],
            of.tokenizer.decode,
            frame_seconds=of.frame_seconds,
            speech=is_speech(self._loudness.levels),
            offset=first * of.frame_seconds,
            spaces=of.spaces,
        )
        last = tokens[-1][1]
        # It stays for the next segment, which a transducer may begin at the same frame.
        self._loudness.forget(last)
        # The next word may start there. Else the last frame may extend beyond the audio, as the
        # number of frames is rounded up.
        end = last * of.frame_seconds if goes_on else self.seconds
        return tuple(replace(word, end=max(word.start, min(word.end, end))) for word in found)

    def _word_confidences(
        self, tokens: Sequence[tuple[int, int]], since: int, goes_on: bool
    ) -> tuple[WordConfidence, ...] | None:
        """The words of a segment before a frame with their confidences, if they are wanted."""
        if self._confidences is None:
            return ()
        of, texts = self.recognizer, [token for token, _ in tokens]
        # A transducer may say labels of both segments at the same frame.
        end = since + 1 if goes_on and of.method == "transducer" else since
        sure = self._confidences.of_segment(texts, end)
        self._confidences.forget(since)
        if sure is None:
            return None
        return word_confidences(
            texts, sure, of.tokenizer.decode, spaces=of.spaces, calibration=of.calibration
        )

    def _end(self) -> None:
        self._end_segment(len(self._tokens), self.frames)
        self._parts, self.done = [], True
