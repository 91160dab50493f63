"""Conversations of trials, with the shape and the proportions of those of a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from effasr.data.batch import StaticShape
from effasr.data.conversation.batch import ConversationBatch
from effasr.data.conversation.budgets import (
    epoch_lengths,
    epoch_mixture,
    split_into_clips,
    static_shape,
)
from effasr.data.conversation.collate import ConversationExample, collate_conversations
from effasr.data.conversation.rows import CLIP
from effasr.data.features.frame_geometry import Framing
from effasr.data.mixture import MixConfig
from effasr.data.sampling.packing import suggest_token_budget
from effasr.data.sampling.plan import UtteranceLengths
from effasr.model.config import ModelConfig

if TYPE_CHECKING:
    from effasr.data.conversation.corpus import ConversationCorpus


@dataclass(frozen=True, slots=True)
class Clips:
    """Clips of the conversations of a trial."""

    longest: int  # Encoder frames of the longest
    most: int  # Most clips of a batch
    stack: int  # k, encoder frames of a row of speech

    def split(self, frames: int) -> Sequence[int]:
        """Return the encoder frames of each clip of a conversation of so many frames."""
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
        if not corpus.longest_clip:
            raise ValueError(
                "`data.frame_budget` must be a number for conversations without speech, whose "
                "batches have no frames, but is 'auto': leave it out, and give data.token_budget."
            )
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

    def taken(self, chosen: np.ndarray) -> Conversations:
        """Return those of some conversations, with the shares of all."""
        return replace(self, sources=self.sources[chosen], clip_counts=self.clip_counts[chosen])

    def token_budget(self, frame_budget: int) -> int:
        """Return the rows of the language model that epochs fill along with the frame budget."""
        return suggest_token_budget(self.drawn, frame_budget, self.sums)

    def shape(
        self,
        lengths: UtteranceLengths,
        frame_budget: int,
        token_budget: int,
        max_sequences: int | None,
        framing: Framing,
    ) -> tuple[StaticShape, Clips]:
        """Return the shape that training has with these budgets, and its clips."""
        assert self.model.language_model is not None
        shape, most = static_shape(
            lengths,
            frame_budget,
            token_budget,
            framing=framing,
            shortest_clip=self.shortest_clip,
            most_clips=int(self.clip_counts.max()),
            max_sequences=max_sequences,
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
