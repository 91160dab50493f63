"""Beam search of a transducer with durations (TDT), over a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from effasr.decoding.nbest.hypothesis import Hypothesis
from effasr.decoding.transducer_hypotheses import (
    NO_SCORE,
    Hypotheses,
    Utterances,
    likelier_frames,
    mapped,
    merge_equal,
    with_equal_room,
    without_frames,
)
from effasr.model.transducer import Transducer
from effasr_kernels import PackedSequence


def tdt_beam(
    head: Transducer,
    encoded: PackedSequence,
    beam: int,
    limits: Sequence[int],
    nbest: int = 1,
    *,
    with_frames: bool = False,
) -> list[list[Hypothesis]]:
    """Find the likeliest transcripts of each sequence of encoder output.

    The search is synchronous in frames: hypotheses at the same frame are compared, and each
    transcript has one of them, whose score is the sum over all paths to it that the beam has kept.
    All symbols and durations lead from there to later frames. A label of duration 0 is followed at
    once, unless K hypotheses that have moved on are likelier. With a beam that is wide enough the
    search is exact.

    Paths are those of the loss (`effasr_kernels.transducer_loss`): a blank lasts at least one
    frame, and the last blank ends with the last frame. Greedy search is less strict, and takes
    symbol and duration separately, so a beam of 1 is not the same.

    Args:
        head: Transducer of the model, with durations.
        encoded: (T, encoder width), from ``model.encode``.
        beam: K, hypotheses of each sequence at each frame.
        limits: Most labels of each sequence's transcript.
        nbest: Hypotheses of each sequence to return, from 1 to ``beam``.
        with_frames: Whether hypotheses have the frames of their labels, which takes time.

    Returns:
        The hypotheses of each sequence, the best first: for an empty one the empty transcript.
    """
    frames = head.encoder_projection(encoded.values)
    assert head.config.durations is not None
    found = without_frames(encoded, len(limits), nbest)
    utterances = Utterances.of(encoded, limits)
    now = Hypotheses.begin(head, len(utterances), beam, with_frames=with_frames)
    empty = replace(now, scores=torch.full_like(now.scores, NO_SCORE))
    ahead = now, *[empty] * max(head.config.durations)
    passed = 0
    while len(utterances):
        ahead = advance(head, frames, utterances, ahead, passed)
        passed += 1
        at_end = utterances.ends - utterances.begins == passed
        index = at_end.nonzero()[:, 0]
        if len(index):
            ahead[0].keep(index).record(utterances.keep(index), NO_SCORE, found)
            going = (~at_end).nonzero()[:, 0]
            utterances, ahead = utterances.keep(going), tuple(one.keep(going) for one in ahead)
    return found.lists()


def advance(
    head: Transducer,
    frames: Tensor,
    utterances: Utterances,
    ahead: Sequence[Hypotheses],
    passed: int | Tensor,
) -> tuple[Hypotheses, ...]:
    """Extend the hypotheses at a frame by all symbols and durations, until all have moved on.

    Args:
        head: Transducer of the model.
        frames: (T, J), projected.
        utterances: N of them.
        ahead: Hypotheses at this frame, at the next one, and so on up to the longest duration.
        passed: Number of earlier frames; one for all utterances, or int64 (N,).

    Returns:
        The same from the next frame on.
    """
    now, *later = ahead
    durations = head.config.durations or ()
    beam = now.scores.shape[1]
    row = utterances.begins + passed
    frame, left = frames[row][:, None], (utterances.ends - row)[:, None]
    number = (row - utterances.begins)[:, None].expand(-1, beam)
    while (now.scores > NO_SCORE).any():
        now = now.read(head)
        logits = head.logits(frame, now.predicted).to(now.scores.dtype)
        symbols = logits[..., : head.blank_id + 1].log_softmax(-1)
        lasting = logits[..., head.blank_id + 1 :].log_softmax(-1)
        said = now.scores[..., None] + symbols
        full = now.counts >= utterances.limits[:, None]
        label, blank = said[..., :-1].masked_fill(full[..., None], NO_SCORE), said[..., -1]
        for place, frames_on in enumerate(durations):
            if frames_on:
                score = lasting[..., place]
                blanks = (blank + score).masked_fill(frames_on > left, NO_SCORE)
                # A label must not reach the end, because a blank must come last.
                past = (frames_on >= left)[..., None]
                labels = (label + score[..., None]).masked_fill(past, NO_SCORE)
                there = later[frames_on - 1]
                later[frames_on - 1] = _extended(there, now, blanks, labels, number)
        scores, chosen = (label + lasting[..., :1]).flatten(1).topk(beam)
        # Later hypotheses cannot become likelier.
        bar = torch.cat([one.scores for one in later], 1).topk(beam).values[:, -1:]
        scores = scores.masked_fill(scores <= bar, NO_SCORE)
        parent, new = chosen // label.shape[-1], chosen % label.shape[-1]
        now = now.pick(parent).with_labels(scores, scores > NO_SCORE, new, number)
    nothing = torch.full_like(now.scores, NO_SCORE)
    empty = replace(now, scores=nothing, counts=torch.zeros_like(now.counts))
    return with_equal_room((*later, empty))


def _extended(
    there: Hypotheses, now: Hypotheses, blank: Tensor, label: Tensor, frame: Tensor
) -> Hypotheses:
    """Return the best hypotheses at a later frame: existing ones, and extensions of current ones.

    Args:
        there: Hypotheses at the later frame.
        now: Hypotheses at this frame.
        blank: Scores of these with a blank, (N, K).
        label: Scores of these with each label, (N, K, V).
        frame: int64 (N, K), this frame.
    """
    there, now = with_equal_room((there, now))
    beam, classes = now.scores.shape[1], label.shape[-1]
    both = mapped(lambda *parts: torch.cat(parts, 1), there, now)
    reached = _with_blanks(there, now, both, blank)
    merged, label = merge_equal(reached.scores, reached, label, now, frame)
    best, chosen = torch.cat([merged.scores, label.flatten(1)], 1).topk(beam)
    new = chosen - 2 * beam
    is_label = new >= 0
    place = torch.where(is_label, beam + new.div(classes, rounding_mode="floor"), chosen)
    picked = both.pick(place)
    if picked.frames is not None:
        picked = replace(picked, frames=likelier_frames(picked, merged, place, ~is_label))
    return picked.with_labels(best, is_label & (best > NO_SCORE), new % classes, frame)


def _with_blanks(there: Hypotheses, now: Hypotheses, both: Hypotheses, blank: Tensor) -> Hypotheses:
    """Return ``there``, and ``now`` with ``blank`` as scores, with equal transcripts merged."""
    # (N, now, there)
    same = (now.labels[:, :, None] == there.labels[:, None]).all(-1)
    same &= (there.scores > NO_SCORE)[:, None] & (now.scores > NO_SCORE)[..., None]
    moved = blank[..., None].masked_fill(~same, NO_SCORE)
    scores = torch.cat([there.scores[:, None], moved], 1).logsumexp(1)
    blank = blank.masked_fill(same.any(2), NO_SCORE)
    both = replace(both, scores=torch.cat([scores, blank], 1))
    if now.frames is None:
        return both
    likeliest, origin = moved.max(1)
    frames = likelier_frames(there, now, origin, likeliest > there.scores)
    return replace(both, frames=torch.cat([frames, now.frames], 1))
