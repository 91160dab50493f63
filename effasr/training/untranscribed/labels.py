"""Greedy CTC labels in the static shape of a batch, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from effasr_kernels import PackedLayout, PackedSequence
from effasr_kernels.packed import OffsetsOnDemand


def emitted(best: Tensor, layout: PackedLayout, blank_id: int) -> Tensor:
    """Return the frames at which greedy CTC decoding writes a token: bool (T,).

    Args:
        best: int64 (T,), the likeliest class of each frame.
        layout: Encoder frames, N sequences.
        blank_id: Class of the blank.
    """
    previous = torch.nn.functional.pad(best[:-1], (1, 0), value=blank_id)
    first = layout.positions() == 0
    return (best != blank_id) & (first | (best != previous)) & layout.mask()


def add_labels(
    text: PackedSequence, best: Tensor, says: Tensor, frames: PackedLayout, room: Tensor
) -> tuple[PackedSequence, Tensor]:
    """Write labels beside transcripts.

    Args:
        text: int64 (U,), transcripts; empty for the utterances to label.
        best: int64 (T,), the likeliest class of each frame.
        says: bool (T,), at which frames it is written.
        frames: Layout of these, N sequences.
        room: int64 (N,), tokens that a label may have; 0 for an utterance with a transcript.

    Returns:
        Transcripts and labels in the same number of rows, with the layout on the device alone; and
        int64 (N,), the tokens that each utterance to label has, 0 for the others. A label that has
        more than ``room`` is left out.
    """
    count, rows = frames.num_sequences, text.layout.rows
    owner = frames.sequence_ids()
    before = torch.nn.functional.pad(says.long().cumsum(0), (1, 0))
    offsets = frames.cu_seqlens.long()
    tokens = before[offsets[1:]] - before[offsets[:-1]]
    tokens = torch.where(room > 0, tokens, 0)
    fits = (tokens <= room) & (tokens > 0)
    lengths = text.layout.cu_seqlens.long().diff() + torch.where(fits, tokens, 0)
    begins = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    values = text.values.new_zeros(rows + 1)
    # Rows that are not written go to a spare row past the last.
    source = text.layout.sequence_ids()
    real = source < count
    to = torch.where(real, begins[source] + text.layout.positions(), rows)
    values.scatter_(0, to, text.values)
    padded_fits = torch.nn.functional.pad(fits, (0, 1))
    place = begins[owner] + before[:-1] - before[offsets[owner]]
    to = torch.where(says & padded_fits[owner], place, rows)
    values.scatter_(0, to, best)
    cu_seqlens = begins.int()
    bound = text.layout.static_max_seqlen
    layout = PackedLayout(cu_seqlens, OffsetsOnDemand(cu_seqlens), rows, bound)
    return PackedSequence(values[:-1], layout), tokens
