"""All conversations of a run, in arrays that worker processes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np

from effasr.data.audio.audio_file import AudioError
from effasr.data.audio.waveform import AudioSegment, load_audio
from effasr.data.batch import StaticShape
from effasr.data.conversation.batch import ConversationBatch
from effasr.data.conversation.collate import ConversationExample, collate_conversations
from effasr.data.conversation.epochs import populations
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr.data.filters.rules import Dropped
from effasr.data.index.base_corpus import BaseCorpus
from effasr.data.index.columns import AudioColumns, Ragged, decode
from effasr.data.mixture_summary import Mixture
from effasr.data.prompt import Prompt
from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.sampling.population import Population

if TYPE_CHECKING:
    from effasr.data.index.text_corpus import TextCorpus


@dataclass(frozen=True, slots=True, eq=False)
class ConversationCorpus(BaseCorpus):
    """Conversations that can be trained on; see `corpus_builder.load_conversation_corpus`.

    It serves the loader and the trainer as `effasr.data.index.corpus.Corpus` does.

    Attributes:
        lengths: Encoder frames of all clips, and rows of the language model, of each conversation.
        shape: The static shape of every batch; its tokens are the rows of the language model.
        dropped: Conversations of the manifests that were left out, with the reasons.
        seconds: Total duration of the speech.
        amounts: int32 (n,), rows of each conversation, by which shares are measured.
        samples: int64 (n,), samples of speech of each conversation at `SAMPLE_RATE`.
        sources: uint16 (n,), the source of each conversation.
        mixture: Requested share of each source; None without shares.
        fingerprint: Digest of lengths, rows, sources and order, which a resumed run compares.
        stack: Encoder frames of a row of speech.
        max_clips: Most clips of a batch.
        shortest_clip: Encoder frames of the shortest clip; 0 without speech.
        longest_clip: Encoder frames of the longest clip; 0 without speech.
        eos_id: Token that ends a turn.
        pad_id: Token of the tail.
        ids: Ids of the conversations.
        coded: Rows of each; see `effasr.data.conversation.rows`.
        audio_columns: Speech of all.
        clip_ends: int64 (n + 1,); conversation i has the clips from ``clip_ends[i]`` to the next.
        divided: Conversations of the manifests that have an example for each answer; see
            `effasr.data.conversation.tokenize.training_rows`.
        prompt: Unused; conversations have no prompt of utterances.
        text: None; texts are conversations, too.
    """

    lengths: UtteranceLengths
    shape: StaticShape
    dropped: tuple[Dropped, ...]
    seconds: float
    amounts: np.ndarray
    samples: np.ndarray
    sources: np.ndarray
    mixture: Mixture | None
    fingerprint: str
    stack: int
    max_clips: int
    shortest_clip: int
    longest_clip: int
    eos_id: int
    pad_id: int
    ids: Ragged
    coded: Ragged
    audio_columns: AudioColumns
    clip_ends: np.ndarray
    divided: int = 0
    prompt: Prompt = field(default_factory=Prompt)
    text: TextCorpus | None = None

    def populations(self, seed: int) -> Population | None:
        """Return the function that draws an epoch's members; None if an epoch has each once."""
        return populations(self.mixture, self.lengths, self.sources, seed=seed)

    @property
    def text_lengths(self) -> np.ndarray:
        """Rows of each conversation without its speech, int32 (n,)."""
        return self.lengths.tokens - -(-self.lengths.frames // self.stack)

    @property
    def clip_counts(self) -> np.ndarray:
        """Clips of each conversation, int64 (n,)."""
        return np.diff(self.clip_ends)

    def token_ids(self, vocab_size: int) -> np.ndarray:
        """Return the distinct token ids, sorted."""
        values = self.coded.values
        ids = np.where(values < 0, ~values, values)
        return np.unique(ids[(ids >= 0) & (ids < vocab_size)])

    def clips(self, index: int) -> list[AudioSegment]:
        """Return the speech of a conversation, in order."""
        segments = [self.audio_columns[row] for row in range(*self.clip_ends[index : index + 2])]
        return cast("list[AudioSegment]", segments)

    def audio(self, index: int) -> AudioSegment:
        """Return the first clip of a conversation, for messages; of no file without any."""
        clips = self.clips(index)
        return clips[0] if clips else AudioSegment("", 0.0, 0.0, (0,))

    def name(self, index: int) -> str:
        """Return the id of a conversation."""
        return decode(self.ids[index])

    def duration(self, index: int) -> float:
        """Return the duration of the speech of a conversation, in seconds."""
        return int(self.samples[index]) / SAMPLE_RATE

    def rows(self, index: int) -> np.ndarray:
        """Return the coded rows of a conversation; see `effasr.data.conversation.rows`."""
        return self.coded[index]

    def example(self, index: int) -> ConversationExample:
        """Return the conversation with its speech, ready to be packed.

        Raises:
            AudioError: A clip cannot be read; the message names file and conversation.
        """
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
        """Pack conversations on the CPU; see `collate_conversations`.

        Raises:
            ValueError: ``padded`` is true, which only other strategies than packed have.
        """
        if padded:
            raise ValueError("`padded` must be false for conversations, but is true: leave it out.")
        return collate_conversations(
            examples,
            shape,
            stack=self.stack,
            pad_id=self.pad_id,
            max_clips=self.max_clips,
            framing=self.shape.framing,
        )
