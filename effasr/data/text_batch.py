"""Text-only micro-batches: sentences in the place of speech."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from effasr.data.batch import IGNORED, Batch, StaticShape, check_fits, pack_ids
from effasr_kernels import PackedLayout, PackedSequence


@dataclass(frozen=True, slots=True)
class TextExample:
    """A text and its translation, ready to be packed.

    Attributes:
        id: Its name.
        source: Token ids that the text encoder reads; at least one.
        prompt: Token ids that the decoder is given; at least one.
        text: Token ids that it must write, without the end token.
    """

    id: str
    source: list[int]
    prompt: list[int]
    text: list[int]


def collate_text(
    examples: Sequence[TextExample], shape: StaticShape, *, eos_id: int, pad_id: int
) -> Batch:
    """Pack text pairs into a static shape.

    As in `effasr.data.batch.collate`, but `Batch.source` is what the decoder attends to, there is
    no audio, and nothing for CTC, the transducer or guided attention to learn from.

    Args:
        examples: The pairs; none at all is a batch of tails.
        shape: Its frames are the rows of the text encoder.
        eos_id: The token that ends a text.
        pad_id: The token of the tails.

    Returns:
        The batch, on the CPU.

    Raises:
        ValueError: A prompt is empty, or the pairs do not fit in the shape.
    """
    for example in examples:
        if not example.prompt:
            raise ValueError(f"{example.id}: `prompt` must have at least one token, but is empty.")
    count, rows, longest = shape.max_sequences, shape.token_budget, shape.longest_tokens
    tokens = [example.prompt + example.text for example in examples]
    targets = [
        [IGNORED] * (len(example.prompt) - 1) + example.text + [eos_id] for example in examples
    ]
    read = [example.source for example in examples]
    check_fits(shape, len(examples), sum(map(len, read)), sum(map(len, tokens)))
    source = pack_ids(
        read,
        shape.frame_budget,
        count,
        pad_id,
        shape.longest_frames,
    )
    return Batch(
        audio=PackedSequence(
            torch.zeros(0), PackedLayout.from_lengths([], num_sequences=count, static_max_seqlen=0)
        ),
        frames=source.layout,
        tokens=pack_ids(tokens, rows, count, pad_id, longest),
        targets=pack_ids(targets, rows, count, IGNORED, longest).values,
        text=pack_ids([], 0, count, pad_id, 0),
        monotonic=torch.zeros(count, dtype=torch.bool),
        ids=tuple(example.id for example in examples),
        audio_seconds=0.0,
        num_targets=sum(len(example.text) + 1 for example in examples),
        num_monotonic_targets=0,
        frame_lengths=tuple(len(example.source) for example in examples),
        token_lengths=tuple(map(len, tokens)),
        source=source,
    )
