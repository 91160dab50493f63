"""Splits a micro-batch in two after an out-of-memory error."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from effasr.data.batch import IGNORED, Batch
from effasr.data.conversation.batch import ConversationBatch
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr_kernels import PackedLayout, PackedSequence


def split(batch: Batch) -> tuple[Batch, Batch]:
    """Split a batch on the host between two utterances, into parts of similar size.

    The parts have no padding to a static shape, which would take memory.
    """
    count = len(batch.ids)
    if count < 2:
        raise ValueError(f"`batch` must have two utterances or more to be split, but has {count}.")
    sizes = [
        frames + tokens
        for frames, tokens in zip(batch.frames.lengths, batch.tokens.layout.lengths, strict=True)
    ]
    ends = list(accumulate(sizes[:count]))
    middle = min(range(1, count), key=lambda place: abs(2 * ends[place - 1] - ends[-1]))
    return utterances(batch, 0, middle), utterances(batch, middle, count)


def utterances(batch: Batch, begin: int, end: int) -> Batch:
    """Return utterances ``begin`` to ``end - 1`` of a batch, unchanged."""
    if isinstance(batch, ConversationBatch):
        return batch.part(begin, end)
    targets = _rows(batch.targets, batch.tokens.layout, begin, end)
    tokens = _sequences(batch.tokens, begin, end)
    monotonic = batch.monotonic[begin:end]
    audio = _sequences(batch.audio, begin, end)
    frames = _layout(batch.frames, begin, end)
    counted = targets != IGNORED
    of_transcriptions = monotonic[tokens.layout.sequence_ids()]
    return replace(
        batch,
        audio=audio,
        frames=frames,
        tokens=tokens,
        targets=targets,
        text=_sequences(batch.text, begin, end),
        monotonic=monotonic,
        ids=batch.ids[begin:end],
        audio_seconds=audio.layout.total / SAMPLE_RATE,
        num_targets=frames.total if batch.is_untranscribed else int(counted.sum()),
        num_monotonic_targets=int((counted & of_transcriptions).sum()),
        frame_lengths=batch.frame_lengths[begin:end],
        token_lengths=batch.token_lengths[begin:end],
        label_room=None if batch.label_room is None else batch.label_room[begin:end],
        source=None if batch.source is None else _sequences(batch.source, begin, end),
        expert=None if batch.expert is None else batch.expert[begin:end],
        # Part of the static shape: for a part of the batch it would take memory.
        node_budget=None,
    )


def _sequences(packed: PackedSequence, begin: int, end: int) -> PackedSequence:
    values = _rows(packed.values, packed.layout, begin, end)
    return PackedSequence(values, _layout(packed.layout, begin, end))


def _rows(values: Tensor, layout: PackedLayout, begin: int, end: int) -> Tensor:
    offsets = layout.cu_seqlens_host
    # A copy, so that the whole tensor need not be kept for a part.
    return values[offsets[begin] : offsets[end]].clone(memory_format=torch.contiguous_format)


def _layout(layout: PackedLayout, begin: int, end: int) -> PackedLayout:
    return PackedLayout.from_lengths(layout.lengths[begin:end])
