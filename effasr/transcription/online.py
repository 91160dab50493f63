"""Recognition of streams frame by frame, by encoders that are trained with limited contexts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from effasr.data.audio.waveform import is_plausible
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.streaming.ctc import CTCStreams
from effasr.decoding.streaming.transducer import TransducerStreams
from effasr.model.asr import ASRModel
from effasr.model.checks import check
from effasr.model.encoder import FastConformerConfig
from effasr.model.streaming_encoder import StreamingEncoder, check_features, check_streamable
from effasr.nn.parameters.evaluating import evaluating
from effasr.transcription.inputs.prefetch import ahead
from effasr.transcription.inputs.stream_loudness import StreamLoudness
from effasr.transcription.inputs.vad import is_speech
from effasr.transcription.results import Segment
from effasr.transcription.word_timestamps import Word, word_timestamps
from effasr_kernels import Context, PackedLayout, PackedSequence

Method = Literal["auto", "transducer", "ctc"]

_SHORT_SAMPLES = 1 << 16
_BEFORE_SECONDS = 1.0
"""Loudness that is kept before a segment, to find the start of its first word."""


def transcribe_online(
    recognizer: OnlineRecognizer, blocks: Iterable[np.ndarray]
) -> Iterator[Segment]:
    """Transcribe audio while it arrives; yields segments as soon as they are final.

    Samples are read on a thread, so that the recorder need not wait during decoding.

    Args:
        recognizer: It has room for one more stream.
        blocks: float32 (samples,) each, mono, at the recognizer's rate, as they arrive.

    Raises:
        ValueError: The stream is damaged.
    """
    stream = recognizer.open()
    for block in ahead(blocks):
        stream.feed(block)
        recognizer.decode()
        yield from stream.take()
    stream.finish()
    recognizer.decode()
    yield from stream.take()


def is_streamable(model: ASRModel) -> bool:
    """Whether `OnlineRecognizer` decodes with a model in its first context."""
    try:
        _check_model(model, "auto", _contexts(model)[:1])
    except ValueError:
        return False
    return True


def context_for(model: ASRModel, latency_seconds: float | None) -> Context:
    """Return the trained context with the longest chunk that a latency allows.

    Args:
        model: The model.
        latency_seconds: Longest chunk; the first trained context by default.

    Raises:
        ValueError: The model has no contexts, or all chunks are longer.
    """
    contexts = _contexts(model)
    if not contexts:
        raise ValueError(
            "`model.encoder.context` must be given to decode a stream frame by frame, but the "
            "encoder attends to whole utterances: use a model that is trained with a context."
        )
    if latency_seconds is None:
        return contexts[0]
    frame = model.config.features.framing.seconds
    # A latency of 240 ms allows three frames of 80 ms, however the numbers are rounded.
    short = [one for one in contexts if one.chunk * frame <= latency_seconds + 1e-6]
    if not short:
        least = min(one.chunk for one in contexts) * frame
        raise ValueError(
            f"`latency_seconds` must be at least {least:g} for this model, its shortest chunk, but "
            f"is {latency_seconds:g}."
        )
    return max(short, key=lambda one: (one.chunk, one.left or 0))


class OnlineRecognizer:
    """Transcribes streams while they arrive, several at a time in one batch.

    The encoder and the search keep a state of constant size for each stream, and segments have a
    longest length, so that the work and the memory of a stream do not grow with its length. The
    tokens are those of `Recognizer` with the same context on the whole recording, if it decodes it
    as one chunk, whatever pieces the audio comes in.

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
        endpoint_seconds: float | None = 1.2,
        longest_seconds: float | None = 30.0,
        words: bool = False,
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
            max_symbols: Most labels of a frame in the search of a transducer.
            endpoint_seconds: Time without a token that ends a segment; None to end none by it.
            longest_seconds: A segment ends before the first word that begins so long after its
                first token, and wherever it is twice as long; None for segments of any length.
            words: Whether segments have the times of their words, of the frames at which the search
                emits their tokens, and of the pauses in the audio.
            spaces: Whether spaces separate words; else each character is one.

        Raises:
            ValueError: The model looks ahead, or has neither output.
        """
        contexts = _contexts(model)[:1] if context is None else [context]
        self.method = _check_model(model, method, contexts)
        self.context = contexts[0]
        check(max_symbols >= 1, "max_symbols", "be at least 1", max_symbols)
        if endpoint_seconds is not None:
            check(endpoint_seconds > 0, "endpoint_seconds", "be above 0", endpoint_seconds)
        if longest_seconds is not None:
            check(longest_seconds > 0, "longest_seconds", "be above 0", longest_seconds)
        self.model, self.tokenizer = model, tokenizer
        features = model.config.features
        self.sample_rate, self.frame_seconds = features.sample_rate, features.framing.seconds
        self.endpoint_seconds, self.longest_seconds = endpoint_seconds, longest_seconds
        self.words, self.spaces = words, spaces
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
            self._search: CTCStreams | TransducerStreams
            if self.method == "ctc":
                self._search = CTCStreams(model, streams)
            else:
                assert model.transducer is not None
                self._search = TransducerStreams(model.transducer, streams, max_symbols)
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
        stream = self._open[slot] = OnlineStream(self)
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
        for slot, tokens in enumerate(self._search.step(encoded, frames)):
            stream = self._open[slot]
            if stream is not None and frames[slot]:
                stream._add([(one.token, one.frame) for one in tokens], frames[slot])
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

    def __init__(self, recognizer: OnlineRecognizer):
        """Called by `OnlineRecognizer.open`."""
        self.recognizer = recognizer
        self.finished = self.done = False
        self.frames = 0
        self._parts: list[np.ndarray] = []
        self._begin = self._end_sample = 0
        self._tokens: list[tuple[int, int]] = []
        self._segments: deque[Segment] = deque()
        self._loudness: StreamLoudness | None = None
        if recognizer.words:
            self._loudness = StreamLoudness(recognizer.sample_rate, recognizer.frame_seconds)

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
        """Text of the segment that is not yet final: a partial result, which only grows."""
        return self.recognizer.tokenizer.decode(self.tokens).strip()

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

    def _add(self, tokens: Sequence[tuple[int, int]], frames: int) -> None:
        """Add the tokens of a chunk, each with its frame, and end a segment after a pause."""
        pause, seconds = self.recognizer.endpoint_seconds, self.recognizer.frame_seconds
        most = None if pause is None else pause / seconds
        self._listen(frames)
        for token, frame in tokens:
            self._split(self.frames + frame, most)
            if self._is_long(token, self.frames + frame):
                self._end_segment(goes_on=True)
            self._tokens.append((token, self.frames + frame))
        self.frames += frames
        self._split(self.frames, most)
        if self._loudness is not None and not self._tokens:
            self._loudness.forget(self.frames - round(_BEFORE_SECONDS / seconds))

    def _listen(self, frames: int) -> None:
        """Measure the loudness of the next frames."""
        if self._loudness is not None:
            size = self.recognizer._factor * self.recognizer._hop
            first = self.frames * size - self._begin
            self._loudness.add(self._parts[0][first : first + frames * size], frames)

    def _is_long(self, token: int, frame: int) -> bool:
        """Whether the segment is to end before a token, because it would be too long with it."""
        longest = self.recognizer.longest_seconds
        if longest is None or not self._tokens:
            return False
        length = (frame + 1 - self._tokens[0][1]) * self.recognizer.frame_seconds
        if length <= longest:
            return False
        text = self.recognizer.tokenizer.decode([*self.tokens, token])
        begins = not self.recognizer.spaces or len(text.split()) > len(self.text.split())
        return begins or length > 2 * longest

    def _split(self, frame: int, most: float | None) -> None:
        """End the segment if its last token is too long before a frame."""
        if most is not None and self._tokens and frame - self._tokens[-1][1] - 1 >= most:
            self._end_segment()

    def _end_segment(self, *, goes_on: bool = False) -> None:
        """End the open segment, after which speech goes on without a pause, or not."""
        if self._tokens:
            seconds = self.recognizer.frame_seconds
            start, end = self._tokens[0][1] * seconds, (self._tokens[-1][1] + 1) * seconds
            end = min(end, max(self.seconds, start))
            self._segments.append(Segment(start, end, self.text, words=self._words(goes_on)))
            self._tokens = []

    def _words(self, goes_on: bool) -> tuple[Word, ...]:
        """The words of the open segment with their times, if they are wanted."""
        if self._loudness is None:
            return ()
        first, of = self._loudness.first, self.recognizer
        found = word_timestamps(
            self.tokens,
            [(frame - first, frame - first + 1) for _, frame in self._tokens],
            of.tokenizer.decode,
            frame_seconds=of.frame_seconds,
            speech=is_speech(self._loudness.levels),
            offset=first * of.frame_seconds,
            spaces=of.spaces,
        )
        last = self._tokens[-1][1]
        # It stays for the next segment, which a transducer may begin at the same frame.
        self._loudness.forget(last)
        # The next word may start there. Else the last frame may extend beyond the audio, as the
        # number of frames is rounded up.
        end = last * of.frame_seconds if goes_on else self.seconds
        return tuple(replace(word, end=max(word.start, min(word.end, end))) for word in found)

    def _end(self) -> None:
        self._end_segment()
        self._parts, self.done = [], True


def _contexts(model: ASRModel) -> list[Context]:
    """The contexts of a model that allow to decode a stream, or if there are none, the others."""
    encoder = model.config.encoder
    every = encoder.context if isinstance(encoder, FastConformerConfig) else ()
    return [one for one in every if one.left is not None and one.right == 0] or list(every)


def _check_model(
    model: ASRModel, method: Method, contexts: Sequence[Context]
) -> Literal["transducer", "ctc"]:
    """Return the search, after checks that no part of the model waits for later audio."""
    check_streamable(model.config.encoder, contexts[0] if contexts else None)
    check_features(model.config.features)
    known = {"transducer": model.transducer is not None, "ctc": model.ctc_head is not None}
    if method == "auto":
        for name, has in known.items():
            if has:
                return name  # type: ignore[return-value]
        raise ValueError(
            "`method` must be transducer or ctc to decode a stream, but the model has neither a "
            "transducer nor a CTC head."
        )
    check(method in known, "method", "be auto, transducer or ctc for a stream", repr(method))
    check(known[method], "method", "be an output of the model", repr(method))
    return method
