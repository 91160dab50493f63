"""Batches for trials, made from the lengths of a corpus."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np

from effasr.checks import check
from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, TextExample, collate, collate_text, with_experts
from effasr.data.conversation.batch import (
    ConversationBatch,
    ConversationExample,
    collate_conversations,
)
from effasr.data.conversation.corpus import (
    epoch_lengths,
    epoch_mixture,
    split_into_clips,
    static_shape,
)
from effasr.data.conversation.rows import CLIP
from effasr.data.features.frame_geometry import FASTCONFORMER, Framing
from effasr.data.index.text_corpus import TextCorpus, balanced_token_budget, text_shape
from effasr.data.mixture import MixConfig
from effasr.data.sampling.cost import CostModel
from effasr.data.sampling.packing import (
    plan_epoch,
    suggest_node_budget,
    suggest_token_budget,
    with_sequences,
)
from effasr.data.sampling.plan import UtteranceLengths
from effasr.model.config import ModelConfig

if TYPE_CHECKING:
    from effasr.data.conversation.corpus import ConversationCorpus

Lengths = list[tuple[int, int]]
"""Encoder frames and decoder tokens of the utterances of a micro-batch."""

_STEPS = 12  # Planned steps from which the batches of a trial and the padding are taken

_LARGEST_SAMPLE = 20_000

_LARGEST_POPULATION = 200_000


@dataclass(frozen=True, slots=True)
class Clips:
    longest: int  # Encoder frames of the longest
    most: int  # Most clips of a batch
    stack: int  # k, encoder frames of a row of speech

    def split(self, frames: int) -> Sequence[int]:
        return split_into_clips(frames, self.longest, self.stack)


@dataclass(frozen=True, slots=True, eq=False)
class Conversations:
    """What a population of conversations has besides lengths."""

    sources: np.ndarray  # uint16 (n,), the source of each conversation
    clip_counts: np.ndarray  # int64 (n,), the clips of each conversation
    shortest_clip: int  # Encoder frames of the shortest clip
    longest_clip: int  # Encoder frames of the longest clip
    model: ModelConfig  # Architecture
    # Rows that each source contributes to an epoch; None where an epoch has every conversation once
    quotas: tuple[int, ...] | None
    drawn: UtteranceLengths  # Lengths of the conversations of an epoch
    # Frames and rows of an epoch, on average; None for the sums of ``drawn``
    sums: tuple[int, int] | None

    @classmethod
    def of(
        cls, corpus: ConversationCorpus, mix: MixConfig | None, model: ModelConfig
    ) -> Conversations:
        """Return those of a corpus that dropped nothing for its budgets."""
        lengths, sources = corpus.lengths, corpus.sources
        rule = "be a number for conversations without speech, whose batches have no frames"
        remedy = "leave it out, and give data.token_budget"
        check(corpus.longest_clip, "data.frame_budget", rule, "'auto'", remedy)
        mixture = None if mix is None else epoch_mixture(mix, lengths, sources)
        drawn, sums = epoch_lengths(lengths, sources, mixture)
        return cls(
            sources,
            corpus.clip_counts,
            corpus.shortest_clip,
            corpus.longest_clip,
            model,
            None if mixture is None else mixture.quotas,
            drawn,
            sums,
        )

    def select(self, chosen: np.ndarray) -> Conversations:
        return replace(self, sources=self.sources[chosen], clip_counts=self.clip_counts[chosen])

    def token_budget(self, frame_budget: int) -> int:
        """Return the rows of the language model that epochs fill along with the frame budget."""
        return suggest_token_budget(self.drawn, frame_budget, self.sums)

    def shape(
        self,
        lengths: UtteranceLengths,
        frame_budget: int,
        token_budget: int,
        max_sequences: int | Literal["auto"] | None,
        framing: Framing,
    ) -> tuple[StaticShape, Clips]:
        assert self.model.language_model is not None
        shape, most = static_shape(
            lengths,
            frame_budget,
            token_budget,
            framing=framing,
            shortest_clip=self.shortest_clip,
            most_clips=int(self.clip_counts.max()),
            max_sequences=max_sequences,
            usual=self.drawn,
        )
        return shape, Clips(self.longest_clip, most, self.model.language_model.stack)

    def probabilities(self, lengths: UtteranceLengths) -> np.ndarray | None:
        """Return how often each conversation is drawn: float64 (n,), of sum 1; None for equally.

        A source is drawn until it has its share of the rows, and its conversations equally often.
        """
        if self.quotas is None:
            return None
        rows = np.bincount(self.sources, weights=lengths.tokens, minlength=len(self.quotas))
        weights = (np.array(self.quotas) / np.maximum(rows, 1))[self.sources]
        return weights / weights.sum()


def conversations_of(
    lengths: Sequence[tuple[int, int]], shape: StaticShape, clips: Clips, vocab_size: int, seed: int
) -> ConversationBatch:
    """Return a batch of these lengths: noise, and texts that the model must write."""
    generator = np.random.default_rng(seed)
    examples = []
    for number, (frames, rows) in enumerate(lengths):
        sizes = clips.split(frames)
        audio = [
            0.1 * generator.standard_normal(shape.framing.samples_of(size), dtype=np.float32)
            for size in sizes
        ]
        speech = sum(-(-size // clips.stack) for size in sizes)
        # The last token is only predicted, and has no row.
        text = ~((np.arange(rows + 1 - speech) + number) % vocab_size)
        coded = np.concatenate([np.full(len(sizes), CLIP), text]).astype(np.int32)
        examples.append(ConversationExample(f"trial-{number}", coded, tuple(audio)))
    return collate_conversations(
        examples,
        shape,
        stack=clips.stack,
        pad_id=0,
        max_clips=clips.most,
        framing=shape.framing,
    )


@dataclass(frozen=True, slots=True)
class TextWork:
    shape: StaticShape  # Shape of text-only batches
    extreme: Lengths  # Tokens to read and to write of the batch that takes the most memory
    aligned: bool  # Whether CTC and the transducer learn from it


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Text pairs that have micro-batches of their own beside speech."""

    corpus: TextCorpus  # In a budget that drops nothing
    budget: int | Literal["auto"] | None  # `DataConfig.text_token_budget`
    costs: tuple[CostModel, CostModel]

    def work(self, speech: UtteranceLengths, shape: StaticShape) -> TextWork:
        """Return the batches that training has beside those of speech in this shape."""
        budget = shape.token_budget if self.budget in (None, "auto") else int(self.budget)
        corpus = self.corpus
        fits = (corpus.lengths.frames <= budget) & (corpus.lengths.tokens <= budget)
        remedy = "give data.text_token_budget, or leave out long texts"
        check(fits.any(), "data.text_token_budget", "hold a text pair", budget, remedy)
        lengths = corpus.lengths.take(fits)
        if self.budget == "auto":
            budget = balanced_token_budget(speech, lengths, shape.frame_budget, self.costs)
        shape = text_shape(lengths, corpus.sources[fits], corpus.shares, budget)
        extreme = longest_together(lengths.frames + lengths.tokens, lengths, shape)
        return TextWork(shape, extreme, corpus.aligned)


@dataclass(frozen=True, slots=True)
class Workload:
    shape: StaticShape  # Shape of every batch
    timed: list[Lengths]  # Usual batches, whose steps are timed
    extreme: Lengths  # The batch that takes the most memory
    # Clips of the conversations of a language model; None for utterances
    clips: Clips | None = None
    text: TextWork | None = None  # Text-only batches of the same run


@dataclass(frozen=True, slots=True, eq=False)
class Population:
    lengths: UtteranceLengths  # Lengths of all utterances that can be planned, or of a sample
    total_frames: int  # Frames of all of them; of conversations in shares, of an epoch
    # Configured token budget; None to derive it from the frame budget
    token_budget: int | None = None
    max_sequences: int | Literal["auto"] | None = None  # `DataConfig.max_sequences`
    framing: Framing = FASTCONFORMER  # Framing of the model's features
    transducer: bool = False  # Whether the model has a transducer, whose lattices have a budget
    # Clips and sources of conversations, whose tokens are the rows of a language model; None for
    # utterances
    conversations: Conversations | None = None
    texts: Texts | None = None  # Text pairs beside speech

    @classmethod
    def of(
        cls,
        lengths: UtteranceLengths,
        token_budget: int | None = None,
        max_sequences: int | Literal["auto"] | None = None,
        framing: Framing = FASTCONFORMER,
        *,
        transducer: bool = False,
        conversations: Conversations | None = None,
        texts: Texts | None = None,
    ) -> Population:
        """Return the population of a corpus; of a very large one a sample with its extremes."""
        total = int(lengths.frames.sum(dtype=np.int64))
        if conversations is not None and conversations.sums is not None:
            total, _ = conversations.sums
        if len(lengths) > _LARGEST_POPULATION:
            stride = -(-len(lengths) // _LARGEST_POPULATION)
            extremes = [int(lengths.frames.argmax()), int(lengths.tokens.argmax())]
            if conversations is not None:
                extremes.append(int(conversations.clip_counts.argmax()))
            chosen = np.unique([*range(0, len(lengths), stride), *extremes])
            lengths = lengths.take(chosen)
            conversations = conversations and conversations.select(chosen)
        return cls(
            *(lengths, total, token_budget, max_sequences, framing, transducer, conversations),
            texts,
        )

    @property
    def longest(self) -> int:
        """Frames of the longest utterance, the smallest possible budget."""
        return max(1, int(self.lengths.frames.max()))

    @property
    def probabilities(self) -> np.ndarray | None:
        """How often each utterance is drawn: float64 (n,), of sum 1; None for equally often."""
        if self.conversations is None:
            return None
        return self.conversations.probabilities(self.lengths)

    def shape(self, frame_budget: int) -> StaticShape:
        return self._shape(frame_budget)[0]

    def _shape(self, frame_budget: int) -> tuple[StaticShape, Clips | None]:
        budget = self.token_budget
        if budget is None and self.conversations is not None:
            budget = self.conversations.token_budget(frame_budget)
        budget = budget or suggest_token_budget(self.lengths, frame_budget)
        fitting = self._fitting(frame_budget, budget)
        selected = fitting.lengths
        if fitting.conversations is not None:
            return fitting.conversations.shape(
                selected, frame_budget, budget, self.max_sequences, self.framing
            )
        nodes = suggest_node_budget(selected, frame_budget, selected) if self.transducer else None
        shape = StaticShape(
            frame_budget,
            budget,
            self.framing.sequences(frame_budget),
            max(1, int(selected.frames.max(initial=1))),
            max(1, int(selected.tokens.max(initial=1))),
            self.framing,
            nodes,
        )
        return with_sequences(shape, self.max_sequences, selected), None

    def workload(self, frame_budget: int, *, batches: int) -> Workload:
        shape, clips = self._shape(frame_budget)
        lengths = self._fitting(shape.frame_budget, shape.token_budget).lengths
        # Rows of a language model are those of speech, too.
        sizes = lengths.tokens if clips is not None else lengths.frames + lengths.tokens
        extreme, usual = longest_together(sizes, lengths, shape), self.planned(shape)
        timed = [usual[n % len(usual)] for n in range(batches)]
        if clips is not None:
            # Speech that was divided anew may have a clip more; all batches have one shape.
            counts = (sum(len(clips.split(f)) for f, _ in lengths) for lengths in [*timed, extreme])
            clips = replace(clips, most=max(clips.most, *counts))
        text = None if self.texts is None else self.texts.work(lengths, shape)
        return Workload(shape, timed, extreme, clips, text)

    def planned(self, shape: StaticShape) -> list[Lengths]:
        """Return micro-batches as the packed planner makes them from a sample of the corpus."""
        fitting = self._fitting(shape.frame_budget, shape.token_budget)
        selected, probabilities = fitting.lengths, fitting.probabilities
        mean = max(float(np.average(selected.frames, weights=probabilities)), 1.0)
        count = min(math.ceil(_STEPS * shape.frame_budget / mean), _LARGEST_SAMPLE)
        # With repetitions, so that a small corpus fills a large budget.
        generator = np.random.default_rng(0)
        if probabilities is None:
            chosen = generator.integers(len(selected), size=max(count, 1))
        else:
            chosen = generator.choice(len(selected), size=max(count, 1), p=probabilities)
        sample = selected.take(chosen)
        plan = plan_epoch(sample, shape=shape, micro_batches=1, seed=0, epoch=0)
        return [
            _pairs(sample, plan.indices[begin:end])
            for begin, end in pairwise(plan.offsets.tolist())
        ]

    def _fitting(self, frames: int, tokens: int) -> Population:
        """Return the population of the utterances that training keeps with these budgets."""
        selected = (self.lengths.frames <= frames) & (self.lengths.tokens <= tokens)
        if selected.all():
            return self
        conversations = self.conversations and self.conversations.select(selected)
        return replace(self, lengths=self.lengths.take(selected), conversations=conversations)


def longest_together(sizes: np.ndarray, lengths: UtteranceLengths, shape: StaticShape) -> Lengths:
    """Return as many utterances as fit, each the largest that does, repeated: int (n,) sizes."""
    order = np.argsort(sizes, kind="stable")[::-1]
    chosen: Lengths = []
    frames, tokens = shape.frame_budget, shape.token_budget
    nodes = shape.node_budget or math.inf
    for f, u in zip(lengths.frames[order].tolist(), lengths.tokens[order].tolist(), strict=True):
        # Repeats the same utterance: no plan holds anything longer.
        while f <= frames and u <= tokens and f * u <= nodes and f + u:
            if len(chosen) == shape.max_sequences:
                return chosen
            chosen.append((f, u))
            frames, tokens, nodes = frames - f, tokens - u, nodes - f * u
    return chosen


def batch_of(
    lengths: Lengths,
    shape: StaticShape,
    vocab_size: int,
    seed: int,
    clips: Clips | None = None,
) -> Batch:
    if clips is not None:
        return conversations_of(lengths, shape, clips, vocab_size, seed)
    generator = np.random.default_rng(seed)
    examples = []
    for number, (frames, tokens) in enumerate(lengths):
        audio = generator.standard_normal(shape.framing.samples_of(frames), dtype=np.float32)
        audio *= 0.1
        if not tokens:
            examples.append(Example(f"trial-{number}", audio, [], None))
            continue
        # No token repeats its predecessor: CTC needs no blank between them and has a path.
        text = (np.arange(max(tokens - 1, 0)) + number) % vocab_size
        examples.append(Example(f"trial-{number}", audio, [0], text.tolist()))
    # An expert costs what any other does, so that all may have the first.
    return with_experts(collate(examples, shape, eos_id=0, pad_id=0))


def text_batch_of(work: TextWork, vocab_size: int) -> Batch:
    """Return the text-only batch that takes the most memory."""
    examples = []
    for number, (read, written) in enumerate(work.extreme):
        ids = ((np.arange(max(read, written)) + number) % vocab_size).tolist()
        examples.append(
            TextExample(f"trial-{number}", [*ids[: read - 1], 0], [0], ids[: written - 1])
        )
    batch = collate_text(examples, work.shape, eos_id=0, pad_id=0, aligned=work.aligned)
    return with_experts(batch)


def _pairs(lengths: UtteranceLengths, indices: np.ndarray) -> Lengths:
    frames, tokens = lengths.frames[indices].tolist(), lengths.tokens[indices].tolist()
    return list(zip(frames, tokens, strict=True))
