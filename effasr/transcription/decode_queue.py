"""Decoding of batches, one by one or by continuous batching."""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from effasr.data.batch import Batch
from effasr.data.tokenizer import ChatTokenizer, Tokenizer
from effasr.decoding.checks import limit_of
from effasr.decoding.config import DecodingConfig
from effasr.decoding.continuous_batching.engine import Engine, Utterance
from effasr.decoding.decode import decode, next_token_scores
from effasr.decoding.decoded import Decoded, EncodedBatch, with_details
from effasr.decoding.lm.boosting import BoostTree
from effasr.decoding.lm.ngram import TokenLM
from effasr.decoding.timestamps import timestamp_rules
from effasr.model.asr import ASRModel
from effasr.nn.cache.paged import PAGE
from effasr.transcription.inputs.chunking import MARGIN_SECONDS, Ahead, Chunk
from effasr.transcription.inputs.vad import Detector, hop_samples
from effasr.transcription.recordings import Piece
from effasr_kernels import PackedSequence

if TYPE_CHECKING:
    from effasr.decoding.language_model.engine import ConversationEngine


_CPU_SLOTS = 32  # a CPU gains nothing from more rows at a time
_FEWEST_SLOTS = 8  # initial slots on a GPU, doubled whenever a batch has more utterances

# Prompt tokens of each utterance that pages are allocated for; with longer prompts fewer fit.
_PROMPT = 16

Named = tuple[Any, Decoded]


class BatchDecoder(Protocol):
    """Decodes batches; results may come later than their batch."""

    def feed(
        self, batch: Batch, prompts: Sequence[list[int]], names: Sequence[Any]
    ) -> Iterator[Named]:
        """Submit a batch; yield finished results of this one or of earlier ones."""
        ...

    def finish(self) -> Iterator[Named]: ...

    def abandon(self) -> list[Any]:
        """Drop everything; return the names of utterances without a result."""
        ...


class SingleBatches:
    """Decodes one batch after the other by `decode`."""

    def __init__(
        self,
        model: ASRModel,
        tokenizer: Tokenizer,
        config: DecodingConfig,
        lm: TokenLM | None,
        boost: BoostTree | None,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._config, self._lm, self._boost = config, lm, boost

    def feed(
        self, batch: Batch, prompts: Sequence[list[int]], names: Sequence[Any]
    ) -> Iterator[Named]:
        parts = self._model, self._tokenizer, batch, prompts, self._config
        yield from zip(names, decode(*parts, self._lm, self._boost), strict=True)

    def finish(self) -> Iterator[Named]:
        return iter(())

    def abandon(self) -> list[Any]:
        return []


@dataclass(slots=True, eq=False)
class _FedBatch:
    encoded: PackedSequence
    prompts: list[list[int]]
    names: list[Any]
    results: list[Decoded | None]


class ContinuousBatches:
    """Greedy search of the attention decoder by continuous batching across batches."""

    def __init__(
        self, model: ASRModel, tokenizer: Tokenizer, config: DecodingConfig, max_frames: int
    ) -> None:
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._max_frames = max_frames
        self._device = next(model.parameters()).device
        self._engine: Engine | None = None
        self._fed: list[_FedBatch] = []
        self._most = _most_slots(config, self._device)
        # Whether results need the encoder output of their batch.
        self._needs_batch = (
            config.wants_words
            or config.confidence
            or config.word_confidence
            or config.nbest is not None
        )

    def feed(
        self, batch: Batch, prompts: Sequence[list[int]], names: Sequence[Any]
    ) -> Iterator[Named]:
        """Yield results until all utterances of this batch have slots."""
        limits = [
            limit_of(self._model, prompt, self._config.max_tokens(frames))
            for prompt, frames in zip(prompts, batch.frames.lengths, strict=False)
        ]
        if self._engine is not None and self._engine.slots < min(len(names), self._most):
            yield from self.finish()
            self._engine = None
        with torch.no_grad():
            encoded = self._model.encode(batch)
        if self._engine is None:
            self._engine = self._build(len(names))
        fed = _FedBatch(encoded, list(prompts), list(names), [None] * len(names))
        self._fed.append(fed)
        self._engine.submit(
            encoded,
            [
                Utterance((fed, index), prompt, limit)
                for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
            ],
        )
        yield from self._results(drain=False)

    def finish(self) -> Iterator[Named]:
        yield from self._results(drain=True)

    def abandon(self) -> list[Any]:
        self._engine = None
        batches, self._fed = self._fed, []
        return [
            name
            for fed in batches
            for name, result in zip(fed.names, fed.results, strict=True)
            if result is None or self._needs_batch
        ]

    def _results(self, *, drain: bool) -> Iterator[Named]:
        if self._engine is None:
            return
        for (fed, index), result in self._engine.results(drain=drain):
            fed.results[index] = result
            complete = None not in fed.results
            # If memory runs out here, `abandon` must still return the batch.
            details = self._with_details(fed) if complete and self._needs_batch else None
            if complete:
                self._fed.remove(fed)
            if not self._needs_batch:
                yield fed.names[index], result
            elif details is not None:
                yield from zip(fed.names, details, strict=True)

    def _with_details(self, fed: _FedBatch) -> list[Decoded]:
        results = [result for result in fed.results if result is not None]
        parts = fed.encoded, fed.prompts, self._tokenizer.eos_id
        return with_details(EncodedBatch(self._model, "attention", *parts), results, self._config)

    def _build(self, utterances: int) -> Engine:
        """Make an engine for this many utterances at a time, or fewer if memory runs out."""
        slots = self._most
        if self._device.type != "cpu":
            slots = min(slots, max(_FEWEST_SLOTS, 1 << (utterances - 1).bit_length()))
        budget = self._config.budget_on(self._device)
        while True:
            try:
                return self._new_engine(slots, budget)
            except torch.OutOfMemoryError:
                if slots == 1:
                    raise
            slots, budget = slots // 2, budget // 2
            self._most = slots

    def _new_engine(self, slots: int, budget: int) -> Engine:
        """Return an engine with pages for the frames of the budget, and for their tokens."""
        config, model = self._config, self._model
        assert model.config.decoder is not None  # checked by check_config
        longest = model.config.decoder.max_positions
        frames = max(budget, self._max_frames)
        tokens = max(longest, config.max_tokens(frames) + slots * (config.extra_tokens + _PROMPT))
        return Engine(
            model,
            self._tokenizer.eos_id,
            self._tokenizer.vocab_size,
            slots=slots,
            max_frames=self._max_frames,
            frame_budget=budget,
            # In the worst case, a sequence leaves most of its last page empty.
            pages=(tokens // PAGE + slots + 1, frames // PAGE + slots + 1),
            # With few utterances, capturing the step in a graph costs more than it saves.
            graph=slots > _FEWEST_SLOTS,
        )


class ConversationBatches:
    """Search of a language model by continuous batching across batches."""

    def __init__(self, model: ASRModel, tokenizer: ChatTokenizer, config: DecodingConfig) -> None:
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._engine: ConversationEngine | None = None
        self._most = _most_slots(config, next(model.parameters()).device)

    def feed(
        self, batch: Batch, prompts: Sequence[list[int]], names: Sequence[Any]
    ) -> Iterator[Named]:
        """Yield results until all conversations of this batch, with its prompts, have slots."""
        # Imported here, because transformers takes seconds.
        from effasr.data.conversation.batch import ConversationBatch
        from effasr.decoding.language_model.engine import ConversationEngine, answer_limits

        assert isinstance(batch, ConversationBatch)
        if self._engine is None:
            self._engine = ConversationEngine(
                self._model,
                self._tokenizer.stop_ids,
                slots=self._most,
                classes=self._tokenizer.vocab_size,
                beam=self._config.beam,
                length_penalty=self._config.effective_length_penalty,
            )
        limits = answer_limits(self._model, batch, self._config.max_tokens)
        self._engine.submit(batch, limits, names)
        yield from self._engine.results(drain=False)

    def finish(self) -> Iterator[Named]:
        if self._engine is not None:
            yield from self._engine.results()

    def abandon(self) -> list[Any]:
        """Drop everything; later batches have half as many conversations at a time."""
        engine, self._engine = self._engine, None
        if engine is None:
            return []
        self._most = max(1, self._most // 2)
        return engine.unfinished


def _most_slots(config: DecodingConfig, device: torch.device) -> int:
    most = config.max_sequences
    return min(most, _CPU_SLOTS) if device.type == "cpu" else most


# Whisper's sequential decoding: windows that begin where the times of the one before end.


# Those of https://github.com/openai/whisper (transcribe.py).
_TEMPERATURES = 0.2, 0.4, 0.6, 0.8, 1.0  # tried in order while the text is not accepted
_MOST_COMPRESSION = 2.4  # of a text that does not repeat itself
_LEAST_LOG_PROB = -1.0  # nats a token, of a text that is probably right
_NO_SPEECH = 0.6  # probability above which an unlikely text is none
_CONTEXT_TEMPERATURE = 0.5  # above which the text is no context of what follows


def windows(
    blocks: Iterable[np.ndarray],
    sample_rate: int,
    detect: Detector,
    window_seconds: float,
    gap_seconds: float | None,
    advance: Callable[[], int],
) -> Iterator[tuple[Chunk, np.ndarray]]:
    """Yield windows of a recording while it is being read.

    ``advance`` says, once a window is decoded, after how many of its samples the next one begins.
    Stretches without speech of at least ``gap_seconds`` before a window are skipped.
    """
    ahead, start, longest = Ahead(blocks), 0, int(window_seconds * sample_rate)
    hop, margin = hop_samples(sample_rate), round(MARGIN_SECONDS * sample_rate)
    while True:
        ahead.fill(longest)
        samples, share = ahead.samples[:longest], 1.0
        if not len(samples):
            return
        quiet = 0
        if gap_seconds is not None:
            speech = detect(samples)
            places, share = np.flatnonzero(speech), float(speech.mean())
            before = max(0, int(places[0]) * hop - margin) if len(places) else len(samples)
            quiet = before if not len(places) or before >= gap_seconds * sample_rate else 0
        if not quiet:
            yield Chunk(start, start + len(samples), share), samples
        step = quiet or advance()
        ahead.take(step)
        start += step


class SequentialBatches(SingleBatches):
    """Decodes a window of each of several recordings, with Whisper's fallbacks."""

    def __init__(
        self,
        model: ASRModel,
        tokenizer: Tokenizer,
        config: DecodingConfig,
        boost: BoostTree | None,
        collate: Callable[[list[Piece]], tuple[Batch, list[list[int]]]],
        sample_rate: int,
    ) -> None:
        super().__init__(model, tokenizer, replace(config, timestamps=True, nbest=1), None, boost)
        self._stamps = timestamp_rules(model, tokenizer).tokens
        self._collate, self._rate = collate, sample_rate
        assert model.config.decoder is not None
        self._most_context = model.config.decoder.max_positions // 2 - 1

    def feed(
        self, batch: Batch, prompts: Sequence[list[int]], names: Sequence[Any]
    ) -> Iterator[Named]:
        prompts = [self._with_context(*pair) for pair in zip(names, prompts, strict=True)]
        results = decode(
            self._model, self._tokenizer, batch, prompts, self._config, None, self._boost
        )
        for piece, prompt, result in zip(names, prompts, results, strict=True):
            yield piece, self._advanced(piece, *self._accepted(piece, prompt, result))

    def _with_context(self, piece: Piece, prompt: list[int]) -> list[int]:
        context = piece.recording.context[-self._most_context :]
        if not context or not self._config.previous_text or self._stamps.previous is None:
            return prompt
        return [self._stamps.previous, *context, *prompt]

    def _accepted(self, piece: Piece, prompt: list[int], result: Decoded) -> tuple[Decoded, float]:
        """Return a text that is likely and not repetitive, and the temperature it is drawn with.

        Without any, it is the likeliest that is not repetitive, with the highest temperature.
        """
        tried: list[tuple[bool, float, Decoded]] = []
        for temperature in (0.0, *_TEMPERATURES):
            if temperature:
                result = self._drawn(piece, prompt, temperature)
            log_prob = mean_log_prob(result)
            varied = compression(self._tokenizer.decode(result.tokens)) <= _MOST_COMPRESSION
            if log_prob < _LEAST_LOG_PROB and self._is_silent(piece):
                piece.fallback = "no_speech"
                return Decoded(()), temperature
            if (varied and log_prob >= _LEAST_LOG_PROB) or not self._config.fallback:
                return result, temperature
            tried.append((varied, log_prob, result))
            piece.fallback = piece.fallback or ("low_likelihood" if varied else "repetition")
        return max(tried, key=lambda item: item[:2])[2], _TEMPERATURES[-1]

    def _drawn(self, piece: Piece, prompt: list[int], temperature: float) -> Decoded:
        config = replace(
            self._config,
            beam=1,
            length_penalty=None,
            coverage_penalty=None,
            temperature=temperature,
        )
        batch, _ = self._collate([piece])
        parts = self._model, self._tokenizer, batch, [prompt], config
        return decode(*parts, None, self._boost)[0]

    def _is_silent(self, piece: Piece) -> bool:
        if self._stamps.no_speech is None:
            return False
        batch, _ = self._collate([piece])
        token = [self._stamps.no_speech]
        scores = next_token_scores(self._model, batch, self._stamps.start, token)
        return math.exp(scores.item()) > _NO_SPEECH

    def _advanced(self, piece: Piece, result: Decoded, temperature: float) -> Decoded:
        """Return what ends within the window; the next one begins behind it."""
        parts, samples = result.parts, piece.chunk.end - piece.chunk.start
        if len(parts) > 1 and parts[-1].end is None and (parts[-2].end or 0.0) > 0:
            parts = parts[:-1]
            samples = min(samples, round((parts[-1].end or 0.0) * self._rate))
        count = parts[-1].last if parts else 0
        recording = piece.recording
        recording.advance = samples
        recording.context += [token for part in parts for token in part.tokens]
        if temperature > _CONTEXT_TEMPERATURE:
            recording.context = []
        piece.chunk = replace(piece.chunk, end=piece.chunk.start + samples)
        return replace(
            result,
            tokens=result.tokens[:count],
            spans=result.spans and result.spans[:count],
            confidences=result.confidences and result.confidences[:count],
            parts=parts,
            alternatives=(),
        )


def mean_log_prob(result: Decoded) -> float:
    if not result.alternatives:
        return -math.inf
    best = result.alternatives[0]
    return best.score / (len(best.tokens) + 1)


def compression(text: str) -> float:
    """Return by how much zlib shortens a text."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
