"""Greedy search of a transducer, with or without durations."""

from __future__ import annotations

import torch
from torch import Tensor

from effasr.model.transducer import Transducer
from effasr_kernels import PackedSequence


def transducer_greedy(
    head: Transducer, encoded: PackedSequence, max_symbols: int
) -> list[list[int]]:
    """Decode sequences of encoder output, independently of each other.

    After a blank the search moves to the next frame, otherwise the label joins the transcript. With
    durations, the likeliest one is the number of frames to move, at least one after a blank. The
    inner loop takes every transcript to its next label over any number of blanks, so that the
    predictor runs once for each label of the longest transcript.

    Args:
        head: Transducer of the model.
        encoded: (T, encoder width), from ``model.encode``.
        max_symbols: Most labels of a frame; then the search moves on by at least one frame.

    Returns:
        The labels of each sequence; none for an empty one.

    References:
        Bataev et al., 2024, https://arxiv.org/abs/2406.06220 (label-looping). With durations, the
        transcripts are those of NeMo's batched search, and of transformers'
        ``ParakeetForTDT.generate``, which does not limit the labels of a frame.
    """
    frames = head.encoder_projection(encoded.values)
    layout, device = encoded.layout, frames.device
    rows, labels = layout.num_sequences, [list[int]() for _ in layout.lengths]
    at = layout.cu_seqlens[:-1].long()
    end = layout.cu_seqlens[1:].long()
    emitted = at.new_zeros(rows)
    predicted, state = head.begin(rows)
    names = torch.arange(rows, device=device)
    while True:
        reached, symbols, lasts = next_labels(head, frames, predicted, at, end)
        kept = reached < end
        # Number of labels of the current frame, or of the next one.
        emitted = torch.where(reached == at, emitted, 0) + 1
        at = reached + torch.where(emitted < max_symbols, lasts, lasts.clamp(min=1))
        emitted = emitted.where(at == reached, 0)
        # Transcripts that have read all their frames are removed.
        index = kept.nonzero()[:, 0]
        for name, symbol in zip(names[index].tolist(), symbols[index].tolist(), strict=True):
            labels[name].append(symbol)
        index = (kept & (at < end)).nonzero()[:, 0]
        if not len(index):
            return labels
        at, end, emitted, names = at[index], end[index], emitted[index], names[index]
        predicted, state = head.step(symbols[index], tuple(part[index] for part in state))


def next_labels(
    head: Transducer, frames: Tensor, predicted: Tensor, at: Tensor, end: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Move over blanks to the next label of each transcript.

    Args:
        head: Transducer of the model.
        frames: (T, J), projected.
        predicted: (N, J), after the labels so far.
        at: int64 (N,), the current row of ``frames`` of each.
        end: int64 (N,), the row after the last of each.

    Returns:
        The row of each label, ``end`` or later if there is none; the labels; and their durations:
        int64 (N,) each.
    """
    at, symbols, lasts = at.clone(), torch.full_like(at, head.blank_id), torch.zeros_like(at)
    durations = head.config.durations
    frames_of = None if durations is None else torch.tensor(durations, device=at.device)
    seeking = (at < end).nonzero()[:, 0]
    while len(seeking):
        logits = head.logits(frames[at[seeking]], predicted[seeking])
        symbols[seeking] = found = logits[:, : head.blank_id + 1].argmax(-1)
        is_blank = found == head.blank_id
        if frames_of is not None:
            lasts[seeking] = frames_of[logits[:, head.blank_id + 1 :].argmax(-1)]
        at[seeking] += lasts[seeking].clamp(min=1) * is_blank
        seeking = seeking[is_blank & (at[seeking] < end[seeking])]
    return at, symbols, lasts
