"""A micro-batch of conversations, and how it is packed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor

from effasr.data.batch import IGNORED, Batch, StaticShape
from effasr.data.conversation.rows import CLIP, input_rows
from effasr.data.features.frame_geometry import FASTCONFORMER, SAMPLE_RATE, Framing
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

    def part(self, begin: int, end: int) -> "ConversationBatch":
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


# Packs conversations into a micro-batch.


@dataclass(frozen=True, slots=True)
class ConversationExample:
    """One conversation, ready to be packed."""

    id: str
    rows: np.ndarray  # int32 (n,), see `effasr.data.conversation.rows`
    clips: tuple[np.ndarray, ...] = ()  # each float32 (samples,), mono, at `SAMPLE_RATE`

    def map_audio(self, function: Callable[[np.ndarray], np.ndarray]) -> "ConversationExample":
        return replace(self, clips=tuple(function(clip) for clip in self.clips))


def asking(
    name: str, rows: Sequence[int], clips: tuple[np.ndarray, ...] = ()
) -> ConversationExample:
    """Return a conversation of which every row is read, so that an answer can follow."""
    # The last row of a conversation is only predicted: this one stands for the answer.
    return ConversationExample(name, np.array([*rows, ~0], dtype=np.int32), clips)


def collate_conversations(
    examples: Sequence[ConversationExample],
    shape: StaticShape | None = None,
    *,
    stack: int,
    pad_id: int,
    max_clips: int | None = None,
    framing: Framing = FASTCONFORMER,
) -> ConversationBatch:
    """Pack conversations on the CPU, with a tail up to a static shape if one is given.

    Every row of the language model but the last of a conversation predicts the next one: a token of
    an assistant's turn is a target, everything else is `IGNORED`. In the tail audio is zero, tokens
    are ``pad_id`` and targets are `IGNORED`. The frames of the shape are the encoder's, its tokens
    the rows of the language model; ``stack`` is the encoder frames of a row of speech.
    """
    samples = [len(clip) for example in examples for clip in example.clips]
    counts = [len(example.clips) for example in examples]
    frames = [framing.frames(length) for length in samples]
    tokens, targets, starts, lengths = _rows(examples, frames, stack)
    by_conversation = sums_by_count(frames, counts)
    sequences = clips = frame_rows = token_rows = audio_rows = speech_rows = None
    longest_frames = longest_tokens = None
    if shape is not None:
        if max_clips is None:
            raise ValueError("`max_clips` must be given for a static `shape`, but is None.")
        filled = {
            "max_sequences": (len(examples), shape.max_sequences),
            "max_clips": (len(samples), max_clips),
            "frame_budget": (sum(frames), shape.frame_budget),
            "token_budget": (len(tokens), shape.token_budget),
        }
        for name, (count, limit) in filled.items():
            if count > limit:
                raise ValueError(
                    f"collate: the batch must fit in `{name}` = {limit}, but fills {count}: give "
                    "it fewer conversations."
                )
        sequences, clips = shape.max_sequences, max_clips
        frame_rows, token_rows = shape.frame_budget, shape.token_budget
        audio_rows = framing.capacity(frame_rows, max_clips)
        speech_rows = min(token_rows, -(-frame_rows // stack) + max_clips)
        longest_frames, longest_tokens = shape.longest_frames, shape.longest_tokens

    def layout(
        lengths: Sequence[int], rows: int | None, count: int | None, longest: int | None = None
    ) -> PackedLayout:
        return PackedLayout.from_lengths(
            lengths, rows=rows, num_sequences=count, static_max_seqlen=longest
        )

    frame_layout = layout(by_conversation, frame_rows, sequences, longest_frames)
    token_layout = layout(lengths, token_rows, sequences, longest_tokens)
    audio_layout = layout(sums_by_count(samples, counts), audio_rows, sequences)
    audio = np.zeros(audio_layout.rows, dtype=np.float32)
    if samples:
        audio[: sum(samples)] = np.concatenate([c for example in examples for c in example.clips])
    stacks, places = stack_rows(
        frames, starts, stack, frame_layout.rows, token_layout.rows, speech_rows
    )
    values = np.full((2, token_layout.rows), [[pad_id], [IGNORED]], dtype=np.int64)
    values[:, : len(tokens)] = np.where(tokens == CLIP, pad_id, tokens), targets
    return ConversationBatch(
        audio=PackedSequence(torch.from_numpy(audio), audio_layout),
        frames=frame_layout,
        tokens=PackedSequence(torch.from_numpy(values[0]), token_layout),
        targets=torch.from_numpy(values[1]),
        text=PackedSequence(
            torch.zeros(0, dtype=torch.int64), layout([0] * len(examples), 0, sequences, 0)
        ),
        monotonic=torch.zeros(token_layout.num_sequences, dtype=torch.bool),
        ids=tuple(example.id for example in examples),
        audio_seconds=sum(samples) / SAMPLE_RATE,
        num_targets=int((targets != IGNORED).sum()),
        num_monotonic_targets=0,
        frame_lengths=tuple(by_conversation),
        token_lengths=tuple(lengths),
        source=None,
        clip_samples=layout(samples, audio_rows, clips),
        clip_frames=layout(frames, frame_rows, clips, longest_frames),
        stacks=stacks,
        speech_rows=places,
        clip_counts=tuple(counts),
        clip_starts=tuple(starts),
        source_lengths=_source_lengths(targets, lengths),
    )


def _source_lengths(targets: np.ndarray, lengths: Sequence[int]) -> tuple[int, ...]:
    parts = np.split(targets != IGNORED, np.cumsum(lengths)[:-1])
    return tuple(int(part.argmax()) for part in parts[: len(lengths)])


def _rows(
    examples: Sequence[ConversationExample], frames: Sequence[int], stack: int
) -> tuple[np.ndarray, np.ndarray, list[int], list[int]]:
    """Return tokens and targets of all conversations, the first row of each clip, and lengths."""
    tokens, targets, starts, lengths = [], [], [], []
    used = rows = 0
    for example in examples:
        counts = [-(-count // stack) for count in frames[used : used + len(example.clips)]]
        used += len(example.clips)
        try:
            inputs, labels, positions = input_rows(example.rows, counts)
        except ValueError as error:
            raise ValueError(f"{example.id}: {error}") from error
        tokens.append(inputs)
        targets.append(labels)
        starts += [rows + position for position in positions]
        lengths.append(len(inputs))
        rows += len(inputs)
    empty = np.zeros(0, dtype=np.int64)
    return np.concatenate([empty, *tokens]), np.concatenate([empty, *targets]), starts, lengths
