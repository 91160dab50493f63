"""Decoding of batches, one by one or by continuous batching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from effasr.data.batch import Batch
from effasr.data.tokenizer import ChatTokenizer, Tokenizer
from effasr.decoding.checks import limit_of
from effasr.decoding.config import LENGTH_PENALTY, DecodingConfig
from effasr.decoding.continuous_batching.engine import Engine, Utterance
from effasr.decoding.decode import decode
from effasr.decoding.decoded import Decoded, with_details
from effasr.decoding.lm.ngram import TokenLM
from effasr.model.asr import ASRModel
from effasr.nn.cache.paged import PAGE
from effasr_kernels import PackedSequence

if TYPE_CHECKING:
    from effasr.decoding.language_model.engine import ConversationEngine

_CPU_SLOTS = 32  # a CPU gains nothing from more rows at a time

_FEWEST_SLOTS = 8  # initial slots on a GPU, doubled whenever a batch has more utterances

# Prompt tokens per utterance that pages are allocated for; with longer prompts fewer utterances
# fit.
_PROMPT = 16

Named = tuple[Any, Decoded]


class Search(Protocol):
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


class BatchSearch:
    """Decodes one batch after the other by `decode`."""

    def __init__(
        self,
        model: ASRModel,
        tokenizer: Tokenizer,
        config: DecodingConfig,
        lm: TokenLM | None,
    ) -> None:
        self._what = model, tokenizer
        self._how = config, lm

    def feed(
        self, batch: Batch, prompts: Sequence[list[int]], names: Sequence[Any]
    ) -> Iterator[Named]:
        yield from zip(names, decode(*self._what, batch, prompts, *self._how), strict=True)

    def finish(self) -> Iterator[Named]:
        return iter(())

    def abandon(self) -> list[Any]:
        return []


@dataclass(slots=True, eq=False)
class _Fed:
    """A batch with unfinished utterances."""

    encoded: PackedSequence
    prompts: list[list[int]]
    names: list[Any]
    results: list[Decoded | None]


class ContinuousSearch:
    """Greedy search of the attention decoder by continuous batching across batches."""

    def __init__(
        self, model: ASRModel, tokenizer: Tokenizer, config: DecodingConfig, max_frames: int
    ) -> None:
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._max_frames = max_frames
        self._device = next(model.parameters()).device
        self._engine: Engine | None = None
        self._fed: list[_Fed] = []
        cpu = self._device.type == "cpu"
        self._most = min(config.max_sequences, _CPU_SLOTS) if cpu else config.max_sequences

    def feed(
        self, batch: Batch, prompts: Sequence[list[int]], names: Sequence[Any]
    ) -> Iterator[Named]:
        """See `Search`; yields results until all utterances of this batch have slots."""
        frames = batch.frames.lengths
        utterances = [
            Utterance(name, prompt, limit_of(self._model, prompt, self._config.max_tokens(length)))
            for name, prompt, length in zip(names, prompts, frames, strict=False)
        ]
        if self._engine is not None and self._engine.slots < min(len(names), self._most):
            yield from self.finish()
            self._engine = None
        with torch.no_grad():
            encoded = self._model.encode(batch)
        if self._engine is None:
            self._engine = self._build(len(names))
        fed = _Fed(encoded, list(prompts), list(names), [None] * len(names))
        for index, one in enumerate(utterances):
            one.name = fed, index
        self._fed.append(fed)
        self._engine.submit(encoded, utterances)
        yield from self._results(drain=False)

    def finish(self) -> Iterator[Named]:
        yield from self._results(drain=True)

    def abandon(self) -> list[Any]:
        self._engine = None
        fed, self._fed = self._fed, []
        return [
            name
            for one in fed
            for name, result in zip(one.names, one.results, strict=True)
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

    @property
    def _needs_batch(self) -> bool:
        """Whether results need the encoder output of their batch."""
        config = self._config
        scored = config.confidence or config.word_confidence or config.nbest is not None
        return config.words or scored

    def _with_details(self, fed: _Fed) -> list[Decoded]:
        """Add scores, alternatives, confidences and spans, where they are requested."""
        results = [one for one in fed.results if one is not None]
        what = self._model, "attention", fed.encoded, fed.prompts
        return with_details(*what, results, self._config, self._tokenizer.eos_id)

    def _build(self, utterances: int) -> Engine:
        """Make an engine for this many utterances at a time, or fewer if memory runs out."""
        slots = self._most
        if self._device.type != "cpu":
            slots = min(slots, max(_FEWEST_SLOTS, 1 << (utterances - 1).bit_length()))
        budget = self._config.frame_budget
        while True:
            try:
                return self._engine_of(slots, budget)
            except torch.OutOfMemoryError:
                if slots == 1:
                    raise
            slots, budget = slots // 2, budget // 2
            self._most = slots

    def _engine_of(self, slots: int, budget: int) -> Engine:
        """Return an engine with pages for the frames of the budget, and for their tokens."""
        config, model = self._config, self._model
        assert model.config.decoder is not None  # checked by check_config
        longest = model.config.decoder.max_positions
        frames = max(budget, self._max_frames)
        tokens = max(longest, config.max_tokens(frames) + slots * (config.extra_tokens + _PROMPT))
        # In the worst case, a sequence leaves most of its last page empty.
        pages = tokens // PAGE + slots + 1, frames // PAGE + slots + 1
        return Engine(
            model,
            self._tokenizer.eos_id,
            self._tokenizer.vocab_size,
            slots=slots,
            max_frames=self._max_frames,
            frame_budget=budget,
            pages=pages,
            # With few utterances, capturing the step in a graph costs more than it saves.
            graph=slots > _FEWEST_SLOTS,
        )


class ConversationSearch:
    """Greedy or beam search of a language model by continuous batching across batches."""

    def __init__(self, model: ASRModel, tokenizer: ChatTokenizer, config: DecodingConfig) -> None:
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._engine: ConversationEngine | None = None
        cpu = next(model.parameters()).device.type == "cpu"
        self._most = min(config.max_sequences, _CPU_SLOTS) if cpu else config.max_sequences

    def feed(
        self, batch: Batch, prompts: Sequence[list[int]], names: Sequence[Any]
    ) -> Iterator[Named]:
        """See `Search`; yields results until all conversations of this batch have slots.

        The prompts are in the batch, one of conversations.
        """
        # Imported here, because transformers takes seconds.
        from effasr.data.conversation.batch import ConversationBatch
        from effasr.decoding.language_model.engine import ConversationEngine, answer_limits

        assert isinstance(batch, ConversationBatch)
        config = self._config
        if self._engine is None:
            penalty = config.length_penalty
            self._engine = ConversationEngine(
                self._model,
                self._tokenizer.stop_ids,
                slots=self._most,
                classes=self._tokenizer.vocab_size,
                beam=config.beam,
                length_penalty=LENGTH_PENALTY if penalty is None else penalty,
            )
        limits = answer_limits(self._model, batch, config.max_tokens)
        self._engine.submit(batch, limits, names)
        yield from self._engine.results(drain=False)

    def finish(self) -> Iterator[Named]:
        if self._engine is not None:
            yield from self._engine.results()

    def abandon(self) -> list[Any]:
        """See `Search`; later batches have half as many conversations at a time."""
        engine, self._engine = self._engine, None
        if engine is None:
            return []
        self._most = max(1, self._most // 2)
        return engine.unfinished
