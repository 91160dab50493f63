"""All conversations of a run, in arrays that worker processes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from effasr.checks import check
from effasr.data.audio.audio_file import AudioError
from effasr.data.audio.waveform import AudioSegment, load_audio
from effasr.data.batch import StaticShape
from effasr.data.conversation.batch import ConversationBatch
from effasr.data.conversation.budgets import populations
from effasr.data.conversation.collate import ConversationExample, collate_conversations
from effasr.data.index.base_corpus import BaseCorpus
from effasr.data.index.columns import AudioColumns, Ragged, decode
from effasr.data.sampling.population import Population


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ConversationCorpus(BaseCorpus):
    """Conversations that can be trained on; see `corpus_builder.load_conversation_corpus`.

    Lengths and shape are of the frames of all clips, and of rows of the language model.
    """

    stack: int  # encoder frames of a row of speech
    max_clips: int  # of a batch
    shortest_clip: int  # encoder frames; 0 without speech
    longest_clip: int  # encoder frames; 0 without speech
    ids: Ragged
    coded: Ragged  # see `effasr.data.conversation.rows`
    audio_columns: AudioColumns  # of all clips
    clip_ends: np.ndarray  # int64 (n + 1,); conversation i has clips from clip_ends[i] on
    divided: int = 0  # conversations that have an example for each answer; see `training_rows`

    @property
    def amounts(self) -> np.ndarray:
        """Rows of each conversation, by which shares are measured."""
        return self.lengths.tokens

    def populations(self, seed: int) -> Population | None:
        return populations(self.mixture, self.lengths, self.sources, seed=seed)

    @property
    def text_lengths(self) -> np.ndarray:
        """Rows of each conversation without its speech, int32 (n,)."""
        return self.lengths.tokens - -(-self.lengths.frames // self.stack)

    @property
    def clip_counts(self) -> np.ndarray:
        return np.diff(self.clip_ends)

    def token_ids(self, vocab_size: int) -> np.ndarray:
        values = self.coded.values
        ids = np.where(values < 0, ~values, values)
        return np.unique(ids[(ids >= 0) & (ids < vocab_size)])

    def clips(self, index: int) -> list[AudioSegment]:
        segments = [self.audio_columns[row] for row in range(*self.clip_ends[index : index + 2])]
        return cast("list[AudioSegment]", segments)

    def audio(self, index: int) -> AudioSegment:
        """Return the first clip of a conversation, for messages; of no file without any."""
        clips = self.clips(index)
        return clips[0] if clips else AudioSegment("", 0.0, 0.0, (0,))

    def name(self, index: int) -> str:
        return decode(self.ids[index])

    def rows(self, index: int) -> np.ndarray:
        """Return the coded rows of a conversation; see `effasr.data.conversation.rows`."""
        return self.coded[index]

    def example(self, index: int) -> ConversationExample:
        """Return the conversation with its speech, ready to be packed."""
        name = self.name(index)
        try:
            clips = tuple(load_audio(clip) for clip in self.clips(index))
        except AudioError as error:
            raise AudioError(error.problem, f"conversation {name!r}: {error}") from error
        return ConversationExample(name, self.coded[index], clips)

    def collate(
        self,
        examples: Sequence[ConversationExample],
        shape: StaticShape | None,
        *,
        padded: bool = False,
    ) -> ConversationBatch:
        check(not padded, "padded", "be false for conversations", "true", "leave it out")
        return collate_conversations(
            examples,
            shape,
            stack=self.stack,
            pad_id=self.pad_id,
            max_clips=self.max_clips,
            framing=self.shape.framing,
        )
