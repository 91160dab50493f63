"""Recognition of streams: the recognizer, its streams, and one stream with a configuration."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from effasr.checks import check
from effasr.data.audio.loudness import is_speech
from effasr.data.audio.waveform import is_plausible
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.checks import check_config
from effasr.decoding.confidence.calibration import ConfidenceCalibration, load_calibration
from effasr.decoding.confidence.tokens import StreamConfidences
from effasr.decoding.config import DecodingConfig
from effasr.decoding.ctc_beam import CTCBeamStreams, Fusion
from effasr.decoding.ctc_greedy import CTCStreams
from effasr.decoding.hypothesis import Hypothesis
from effasr.decoding.lm.boosting import BoostTree
from effasr.decoding.lm.loading import load_boost, load_lm
from effasr.decoding.streams import BeamStreams, Emitted, OpenTranscript
from effasr.decoding.transducer_beam import TDTBeamStreams, TransducerBeamStreams
from effasr.decoding.transducer_greedy import TransducerStreams
from effasr.model.asr import ASRModel
from effasr.model.streaming_encoder import StreamingEncoder
from effasr.nn.parameters import evaluating
from effasr.transcription.inputs.arrival import Interruption, arriving
from effasr.transcription.inputs.vad import StreamLoudness
from effasr.transcription.online.streamable import check_model, context_for, stream_contexts
from effasr.transcription.results import Alternative, Segment, WordConfidence, word_confidences
from effasr.transcription.word_timestamps import Word, in_order, word_timestamps
from effasr_kernels import Context, PackedLayout, PackedSequence

# Segments of a stream: where they end, and what they hold.


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
        # What comes before this frame is final, and the end of the last word in it, in seconds.
        self._since, self._said = 0, 0.0

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
            if words := self._words(tokens, goes_on):
                start, end = words[0].start, words[-1].end
            self._final.append(
                Segment(
                    start,
                    end,
                    self.text([token for token, _ in tokens]),
                    words=words,
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
        # The next word may start at the last frame. Else that may extend beyond the audio, as the
        # number of frames is rounded up.
        until = max(self._said, last * of.frame_seconds if goes_on else self._seconds)
        timed = word_timestamps(
            [token for token, _ in tokens],
            [(frame - first, frame - first + 1) for _, frame in tokens],
            of.tokenizer.decode,
            frame_seconds=of.frame_seconds,
            speech=is_speech(self._loudness.levels),
            offset=first * of.frame_seconds,
            until=until,
            spaces=of.spaces,
        )
        # The last frame stays for the next segment, which a transducer may begin at the same frame.
        self._loudness.forget(last)
        # The last word of the segment before may continue after its last frame.
        times = in_order([(word.start, word.end) for word in timed], self._said, until, 0.0)
        self._said = times[-1][1] if times else self._said
        return tuple(Word(word.text, *time) for word, time in zip(timed, times, strict=True))

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
        config: DecodingConfig | None = None,
        *,
        context: Context | None = None,
        streams: int = 1,
        endpoint_seconds: float | None = 1.2,
        longest_seconds: float | None = 30.0,
        spaces: bool = True,
        prompt: Prompt | None = None,
    ):
        """Prepare the states of a number of streams.

        Args:
            model: A FastConformer with causal convolutions and features without normalisation, and
                a transducer or a CTC head; its weights must not change from now on.
            tokenizer: Tokenizer of the model.
            config: The search, and what segments hold. What it says of batches and of cutting
                recordings has no effect. A language model reads each segment as a text of its own.
            context: Context of the encoder, one that it is trained with; by default the first that
                waits for no later frames.
            streams: Most streams that are open at a time; a batch always has this size.
            endpoint_seconds: Time without a token that ends a segment; None to end none by it.
            longest_seconds: A segment ends before the first word that begins so long after its
                first token, and wherever it is twice as long; None for segments of any length.
            spaces: Whether spaces separate words; else each character is one.
            prompt: Names the language to a model that is told it; English by default.

        Raises:
            ValueError: The model looks ahead or has neither output, or an option is out of range
                or has no effect.
        """
        config = DecodingConfig() if config is None else config
        contexts = stream_contexts(model)[:1] if context is None else [context]
        self.method = check_model(model, config.method, contexts)
        self.context = contexts[0]
        _check_options(model, replace(config, method=self.method))
        if endpoint_seconds is not None:
            check(endpoint_seconds > 0, "endpoint_seconds", "be above 0", endpoint_seconds)
        if longest_seconds is not None:
            check(longest_seconds > 0, "longest_seconds", "be above 0", longest_seconds)
        self.model, self.tokenizer = model, tokenizer
        features = model.config.features
        self.sample_rate, self.frame_seconds = features.sample_rate, features.framing.seconds
        self._hop, self._factor = features.hop, features.rows_per_frame
        self.segment_options = SegmentOptions(
            tokenizer=tokenizer,
            method=self.method,
            sample_rate=features.sample_rate,
            frame_samples=self._factor * self._hop,
            frame_seconds=self.frame_seconds,
            endpoint_seconds=endpoint_seconds,
            longest_seconds=longest_seconds,
            nbest=config.nbest,
            words=config.wants_words,
            word_confidence=config.word_confidence,
            calibration=load_calibration(config.calibration, self.method),
            spaces=spaces,
        )
        self._framing = features.framing
        # Samples that a window reaches beyond the beginning of its hop.
        self._window = features.window // 2 + 1
        lm = load_lm(config, model, tokenizer)
        boost = load_boost(config, model, tokenizer)
        fusion = Fusion.of(lm, config.effective_lm_weight, boost)
        with evaluating(model):
            self._encoder = StreamingEncoder(
                model.encoder,  # type: ignore[arg-type]
                features.mel_bins,
                streams,
                self.context,
            )
            self._search = _stream_search(model, self.method, streams, config, fusion, boost)
        prompts = model.config.language_prompt
        self._language = None if prompts is None else prompts.number_of(prompt or Prompt())
        self._open: list[OnlineStream | None] = [None] * streams

    @property
    def latency_seconds(self) -> float:
        """Length of a chunk: the longest time from a sound to the step that decodes it."""
        return self.context.chunk * self.frame_seconds

    def open(self) -> "OnlineStream":
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
        chunks = {}
        for slot, stream in enumerate(self._open):
            if stream is None:
                continue
            samples = stream._next(stream.samples_needed)
            if samples is not None:
                chunks[slot] = samples
            elif stream.finished:
                self._close(slot, stream)
        return chunks

    def _close(self, slot: int, stream: "OnlineStream") -> None:
        if isinstance(self._search, BeamStreams):
            with evaluating(self.model):
                stream._segments.take_open(self._search.finish(slot))
        with evaluating(self.model):
            stream._segments.end()
            stream._audio.clear()
            stream.done = True
        self._open[slot] = None

    def _step(self, chunks: dict[int, np.ndarray]) -> None:
        rows, mel = self._features(chunks)
        frames = [0] * len(self._open)
        for slot in chunks:
            stream = self._open[slot]
            assert stream is not None
            frames[slot] = min(self.context.chunk, stream._left())
        encoded = self._encoder.step(mel, rows, frames)
        if self.model.language_prompt is not None and self._language is not None:
            with torch.inference_mode():
                number = torch.full(encoded.shape[:2], self._language, device=encoded.device)
                encoded = self.model.language_prompt.tell(encoded, number)
        for slot, emitted in enumerate(self._search.step(encoded, frames)):
            stream = self._open[slot]
            if stream is not None and frames[slot]:
                stream._segments.add(emitted, encoded[slot, : frames[slot]])
                stream._audio.forget(self._factor * self._hop * max(0, stream.frames - 1))
                if stream.finished and not stream._left():
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
        packed = self.model.features(PackedSequence(audio, layout), frames).values
        for slot, length, begin in zip(chunks, lengths, frames.cu_seqlens_host, strict=False):
            stream = self._open[slot]
            assert stream is not None
            before = self._factor if stream.frames else 0
            # Causal subsampling may leave a frame for a chunk without rows of its own.
            rows[slot] = count = min(size, max(0, length // self._hop - before))
            first = begin * self._factor + before
            mel[slot, :count] = packed[first : first + count]
        return rows, mel


class OnlineStream:
    """A stream that an `OnlineRecognizer` transcribes; see there."""

    def __init__(self, recognizer: OnlineRecognizer, slot: int):
        self.recognizer = recognizer
        self.finished = self.done = False
        self._audio = HeldSamples()
        search = recognizer._search if isinstance(recognizer._search, BeamStreams) else None
        self._segments = StreamSegments(
            recognizer.segment_options, recognizer.model, self._audio, search, slot
        )

    def feed(self, samples: np.ndarray) -> None:
        """Add mono samples, floating (samples,), at the recognizer's rate, for `decode`."""
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
        self._audio.append(samples)

    def finish(self) -> None:
        """End the stream: `OnlineRecognizer.decode` decodes the rest, and frees its place."""
        self.finished = True

    @property
    def seconds(self) -> float:
        return self._audio.end / self.recognizer.sample_rate

    @property
    def frames(self) -> int:
        return self._segments.frames

    @property
    def samples_needed(self) -> int:
        """Samples from the beginning of the stream that its next chunk needs, if more follow."""
        of = self.recognizer
        rows = of._factor * (self.frames + of.context.chunk)
        return max(of._hop * rows, of._hop * (rows - 1) + of._window)

    @property
    def tokens(self) -> list[int]:
        return [token for token, _ in self._segments.tokens]

    @property
    def text(self) -> str:
        """Text of the segment that is not yet final; with a beam, of the likeliest hypothesis."""
        return self._segments.text(self.tokens)

    def take(self) -> list[Segment]:
        return self._segments.take()

    def _next(self, needed: int) -> np.ndarray | None:
        """The held samples up to ``needed``, or to the end of a finished stream; None to wait."""
        if self._audio.end < needed and not (self.finished and self._left()):
            return None
        return self._audio.between(self._audio.begin, needed)

    def _left(self) -> int:
        """Frames of the samples so far that are not decoded; more than a chunk while more come."""
        most = self.recognizer._framing.frames(self._audio.end) - self.frames
        return most if self.finished else max(most, self.recognizer.context.chunk)


def _check_options(model: ASRModel, config: DecodingConfig) -> None:
    for name, remedy in (
        ("second_lm", "it reads the earlier segments of a recording, which is decoded as a whole"),
        ("confidence", "a stream has confidences of its words: use `word_confidence`"),
        ("score_parts", "scores are divided for tuning, on recordings"),
    ):
        value = getattr(config, name)
        check(not value, name, "be left out for a stream", value, remedy)
    if config.nbest is not None:
        rule = "be at least 2 with `nbest` for a stream"
        check(config.beam > 1, "beam", rule, config.beam, "greedy search has no alternatives")
    # The times of words are those of the search, which needs no CTC head for them.
    check_config(model, replace(config, words=False))


def _stream_search(
    model: ASRModel,
    method: str,
    streams: int,
    config: DecodingConfig,
    fusion: Fusion | None,
    boost: BoostTree | None,
) -> CTCStreams | TransducerStreams | BeamStreams:
    beam, nbest = config.beam, config.nbest or 1
    if method == "ctc":
        if beam > 1:
            return CTCBeamStreams(model, streams, beam, nbest, fusion)
        return CTCStreams(model, streams, boost)
    assert model.transducer is not None
    if beam == 1:
        return TransducerStreams(model.transducer, streams, config.max_symbols, boost)
    # As many tokens as in recordings: the default is of frames of 80 ms.
    per_frame = DecodingConfig().tokens_per_frame * model.config.features.rows_per_frame / 8
    limit = DecodingConfig(tokens_per_frame=per_frame).max_tokens
    has_durations = model.transducer.config.durations is not None
    search = TDTBeamStreams if has_durations else TransducerBeamStreams
    return search(model.transducer, streams, beam, nbest, limit, boost)


def transcribe_online(
    recognizer: OnlineRecognizer,
    blocks: Iterable[np.ndarray],
    interruption: Interruption | None = None,
) -> Iterator[Segment]:
    """Transcribe blocks, float32 (samples,), that a thread reads; yields final segments.

    Where the source is stalled, its sentence is over: what comes later is another stream.
    """
    begin, stream = 0.0, recognizer.open()
    for block in arriving(blocks, interruption):
        if block is None:
            yield from _finished(recognizer, stream, begin)
            begin += stream.seconds
            stream = recognizer.open()
        else:
            stream.feed(block)
            recognizer.decode()
            yield from (segment.later(begin) for segment in stream.take())
    yield from _finished(recognizer, stream, begin)


def _finished(
    recognizer: OnlineRecognizer, stream: OnlineStream, begin: float
) -> Iterator[Segment]:
    stream.finish()
    recognizer.decode()
    yield from (segment.later(begin) for segment in stream.take())


def online_recognizer(
    model: ASRModel,
    tokenizer: Tokenizer,
    config: DecodingConfig,
    *,
    latency_seconds: float | None = None,
    **options: Any,
) -> OnlineRecognizer:
    """Return a recognizer of one stream, with the longest chunk that a latency allows."""
    rule, remedy = "be auto to decode frame by frame", "frames attend to a cache, by one way alone"
    check(config.attention == "auto", "attention", rule, config.attention, remedy)
    context = context_for(model, latency_seconds)
    return OnlineRecognizer(model, tokenizer, config, context=context, **options)
