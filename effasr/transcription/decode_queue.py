"""Decoding of batches, one by one or by continuous batching."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from effasr.data.batch import Batch
from effasr.data.tokenizer import ChatTokenizer, Tokenizer
from effasr.decoding.checks import limit_of
from effasr.decoding.config import DecodingConfig
from effasr.decoding.continuous_batching.engine import Engine, Utterance
from effasr.decoding.decode import decode
from effasr.decoding.decoded import Decoded, EncodedBatch, with_details
from effasr.decoding.lm.boosting import BoostTree
from effasr.decoding.lm.ngram import TokenLM
from effasr.model.asr import ASRModel
from effasr.nn.cache.paged import PAGE
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

    def finish(self) -> Iterator[Named]:
        """Yield all other results."""
        ...

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
        results = decode(*parts, self._lm, self._boost)
        yield from zip(names, results, strict=True)

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
