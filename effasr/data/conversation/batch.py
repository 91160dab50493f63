"""A micro-batch of conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any, Self, cast

import torch
from torch import Tensor

from effasr.data.batch import IGNORED, Batch
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr_kernels import PackedLayout, PackedSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationBatch(Batch):
    """Conversations, each with any number of clips of speech.

    ``tokens`` are the rows of the language model, ``pad_id`` in the places of speech; ``audio`` and
    ``frames`` have one sequence for each conversation, of all its clips end to end. The layouts of
    the clips have sequences of their own.
    """

    clip_samples: PackedLayout  # M sequences
    clip_frames: PackedLayout  # encoder frames, M sequences
    # int64 (A, k), the frames that each row of speech is made of; T, the number of frame rows, for
    # a frame past the end of its clip
    stacks: Tensor
    speech_rows: Tensor  # int64 (A,), the row of tokens of each row of speech; U for none
    clip_counts: tuple[int, ...]  # of each conversation
    clip_starts: tuple[int, ...]  # first row of each clip among the rows of `tokens`
    # Rows of each conversation before the first that predicts a token of an answer: the input of
    # the encoder of an encoder-decoder model
    source_lengths: tuple[int, ...]

    @property
    def clips(self) -> PackedSequence:
        return PackedSequence(self.audio.values, self.clip_samples)

    def tensors(self) -> tuple[Tensor, ...]:
        clip_parts = (
            self.clip_samples.cu_seqlens,
            self.clip_frames.cu_seqlens,
            self.stacks,
            self.speech_rows,
        )
        return (*Batch.tensors(self), *clip_parts)

    def rewritable(self) -> Self:
        copied = replace(
            Batch.rewritable(self),
            clip_samples=self.clip_samples.rewritable(),
            clip_frames=self.clip_frames.rewritable(),
            stacks=self.stacks.clone(),
            speech_rows=self.speech_rows.clone(),
        )
        return cast("Self", copied)

    def _mapped(self, function: Callable[[Any], Any]) -> Self:
        names = ("clip_samples", "clip_frames", "stacks", "speech_rows")
        mapped = Batch._mapped(self, function)
        clip_parts = {name: function(getattr(self, name)) for name in names}
        return cast("Self", replace(mapped, **clip_parts))

    def part(self, begin: int, end: int) -> ConversationBatch:
        """Return conversations ``begin`` to ``end - 1`` on the host, without a static shape."""
        rows, samples = self.tokens.layout.cu_seqlens_host, self.audio.layout.cu_seqlens_host
        first_clip, last_clip = sum(self.clip_counts[:begin]), sum(self.clip_counts[:end])
        tokens = self.tokens.values[rows[begin] : rows[end]].clone()
        targets = self.targets[rows[begin] : rows[end]].clone()
        audio = self.audio.values[samples[begin] : samples[end]].clone()
        clip_frames = self.clip_frames.lengths[first_clip:last_clip]
        starts = tuple(start - rows[begin] for start in self.clip_starts[first_clip:last_clip])
        frames = PackedLayout.from_lengths(self.frames.lengths[begin:end])
        stacks, speech_rows = stack_rows(
            clip_frames, starts, self.stacks.shape[1], frames.rows, len(tokens)
        )
        text = PackedLayout.from_lengths([0] * (end - begin))
        return replace(
            self,
            audio=PackedSequence(audio, _layout(self.audio.layout, begin, end)),
            frames=frames,
            tokens=PackedSequence(tokens, _layout(self.tokens.layout, begin, end)),
            targets=targets,
            text=PackedSequence(tokens[:0], text),
            monotonic=self.monotonic[begin:end],
            ids=self.ids[begin:end],
            audio_seconds=len(audio) / SAMPLE_RATE,
            num_targets=int((targets != IGNORED).sum()),
            frame_lengths=self.frame_lengths[begin:end],
            token_lengths=self.token_lengths[begin:end],
            clip_samples=_layout(self.clip_samples, first_clip, last_clip),
            clip_frames=PackedLayout.from_lengths(clip_frames),
            stacks=stacks,
            speech_rows=speech_rows,
            clip_counts=self.clip_counts[begin:end],
            clip_starts=starts,
            source_lengths=self.source_lengths[begin:end],
        )


def stack_rows(
    clip_frames: Sequence[int],
    clip_starts: Sequence[int],
    stack: int,
    frame_rows: int,
    token_rows: int,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `ConversationBatch.stacks` and `ConversationBatch.speech_rows`.

    ``frame_rows`` and ``token_rows`` are those of encoder and language model, the tail included;
    ``rows`` is A, by default as many as the clips have.
    """
    counts = [-(-frames // stack) for frames in clip_frames]
    rows = sum(counts) if rows is None else rows
    stacks = torch.full((rows, stack), frame_rows, dtype=torch.int64)
    places = torch.full((rows,), token_rows, dtype=torch.int64)
    begin = 0
    offsets = list(accumulate(clip_frames, initial=0))
    for number, (count, start) in enumerate(zip(counts, clip_starts, strict=True)):
        frames = torch.arange(offsets[number], offsets[number] + count * stack)
        frames = frames.where(frames < offsets[number + 1], frame_rows)
        stacks[begin : begin + count] = frames.view(count, stack)
        places[begin : begin + count] = torch.arange(start, start + count)
        begin += count
    return stacks, places


def sums_by_count(values: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return the sum of each group of neighbours, groups of these sizes."""
    ends = list(accumulate(values, initial=0))
    bounds = list(chain([0], accumulate(counts)))
    return [ends[b] - ends[a] for a, b in pairwise(bounds)]


def _layout(layout: PackedLayout, begin: int, end: int) -> PackedLayout:
    return PackedLayout.from_lengths(layout.lengths[begin:end])
