"""Beam search of a transducer with durations (TDT), over a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from effasr.decoding.transducer_hypotheses import (
    NO_SCORE,
    Hypotheses,
    mapped,
    merge_equal,
    with_equal_room,
)
from effasr.model.transducer import Transducer
from effasr_kernels import PackedSequence


def tdt_beam(
    head: Transducer, encoded: PackedSequence, beam: int, limits: Sequence[int]
) -> list[list[int]]:
    """Find the likeliest transcript of each sequence of encoder output.

    The search is synchronous in frames: hypotheses at the same frame are compared, and each
    transcript has one of them, whose score is the sum over all paths to it that the beam has kept.
    All symbols and durations lead from there to later frames. A label of duration 0 is followed at
    once, unless K hypotheses that have moved on are likelier. With a beam that is wide enough the
    search is exact.

    Paths are those of the loss (`effasr_kernels.transducer_loss`): a blank lasts at least one
    frame, and the last blank ends with the last frame. Greedy search is less strict, and takes
    symbol and duration separately, so a beam of 1 is not the same.

    Args:
        head: Of the model, with durations.
        encoded: (T, encoder width), from ``model.encode``.
        beam: K, hypotheses of each sequence at each frame.
        limits: Most labels of each sequence's transcript.

    Returns:
        The labels of each sequence; none for an empty one.
    """
    frames = head.encoder_projection(encoded.values)
    assert head.config.durations is not None
    found: list[list[int]] = [[] for _ in limits]
    names = [name for name in range(len(found)) if encoded.layout.lengths[name]]
    search = _Search.begin(head, encoded, names, limits, beam)
    passed = 0
    while len(search.names):
        search = _advance(head, frames, search, passed)
        passed += 1
        search = _recorded(search, passed, found)
    return found


@dataclass(frozen=True, slots=True)
class _Search:
    """N utterances.

    Attributes:
        names: int64 (N,), the number of each utterance in the batch.
        begins: int64 (N,), the row of its first frame.
        lengths: int64 (N,), its frames.
        limits: int64 (N,), of labels.
        ahead: Hypotheses at this frame, at the next one, and so on up to the longest duration.
    """

    names: Tensor
    begins: Tensor
    lengths: Tensor
    limits: Tensor
    ahead: tuple[Hypotheses, ...]

    @classmethod
    def begin(
        cls,
        head: Transducer,
        encoded: PackedSequence,
        names: Sequence[int],
        limits: Sequence[int],
        beam: int,
    ) -> _Search:
        """One hypothesis without labels for each of these utterances."""
        number = torch.tensor(names, dtype=torch.int64, device=encoded.values.device)
        bounds = encoded.layout.cu_seqlens.long()
        first = Hypotheses.begin(head, len(names), beam)
        nothing = torch.full_like(first.scores, NO_SCORE)
        reach = max(head.config.durations or (0,))
        return cls(
            names=number,
            begins=bounds[number],
            lengths=bounds[number + 1] - bounds[number],
            limits=torch.tensor([limits[name] for name in names], device=number.device),
            ahead=(first, *[replace(first, scores=nothing)] * reach),
        )


def _recorded(search: _Search, passed: int, found: list[list[int]]) -> _Search:
    """Record the transcripts of utterances at their end, and drop these."""
    at_end = search.lengths == passed
    index = at_end.nonzero()[:, 0]
    if not len(index):
        return search
    transcripts = search.ahead[0].keep(index).transcripts()
    for name, labels in zip(search.names[index].tolist(), transcripts, strict=True):
        found[name] = labels
    going = (~at_end).nonzero()[:, 0]
    return _Search(
        search.names[going],
        search.begins[going],
        search.lengths[going],
        search.limits[going],
        tuple(one.keep(going) for one in search.ahead),
    )


def _advance(head: Transducer, frames: Tensor, search: _Search, passed: int) -> _Search:
    """Extend the hypotheses at a frame by all symbols and durations, until all have moved on."""
    now, *later = search.ahead
    durations = head.config.durations or ()
    beam = now.scores.shape[1]
    frame, left = frames[search.begins + passed][:, None], (search.lengths - passed)[:, None]
    while (now.scores > NO_SCORE).any():
        now = now.read(head)
        logits = head.logits(frame, now.predicted).to(now.scores.dtype)
        symbols = logits[..., : head.blank_id + 1].log_softmax(-1)
        lasting = logits[..., head.blank_id + 1 :].log_softmax(-1)
        said = now.scores[..., None] + symbols
        full = now.counts >= search.limits[:, None]
        label, blank = said[..., :-1].masked_fill(full[..., None], NO_SCORE), said[..., -1]
        for number, frames_on in enumerate(durations):
            if frames_on:
                score = lasting[..., number]
                blanks = (blank + score).masked_fill(frames_on > left, NO_SCORE)
                # Not to the end: a blank must come last.
                past = (frames_on >= left)[..., None]
                labels = (label + score[..., None]).masked_fill(past, NO_SCORE)
                there = later[frames_on - 1]
                later[frames_on - 1] = _extended(there, now, blanks, labels)
        scores, chosen = (label + lasting[..., :1]).flatten(1).topk(beam)
        # What follows cannot become likelier.
        bar = torch.cat([one.scores for one in later], 1).topk(beam).values[:, -1:]
        scores = scores.masked_fill(scores <= bar, NO_SCORE)
        place, new = chosen // label.shape[-1], chosen % label.shape[-1]
        now = now.pick(place).with_labels(scores, scores > NO_SCORE, new)
    nothing = torch.full_like(now.scores, NO_SCORE)
    empty = replace(now, scores=nothing, counts=torch.zeros_like(now.counts))
    return replace(search, ahead=with_equal_room((*later, empty)))


def _extended(there: Hypotheses, now: Hypotheses, blank: Tensor, label: Tensor) -> Hypotheses:
    """The best hypotheses at a later frame, of those there and those that reach it from here.

    Args:
        there: Those at the later frame.
        now: Those at this frame.
        blank: Scores of these with a blank, (N, K).
        label: Scores of these with each label, (N, K, V).
    """
    there, now = with_equal_room((there, now))
    beam, classes = now.scores.shape[1], label.shape[-1]
    scores = _with_blanks(there, now, blank)
    both = mapped(lambda *parts: torch.cat(parts, 1), there, now)
    scores, label = merge_equal(scores, replace(both, scores=scores), label, now)
    best, chosen = torch.cat([scores, label.flatten(1)], 1).topk(beam)
    new = chosen - 2 * beam
    is_label = new >= 0
    place = torch.where(is_label, beam + new.div(classes, rounding_mode="floor"), chosen)
    return both.pick(place).with_labels(best, is_label & (best > NO_SCORE), new % classes)


def _with_blanks(there: Hypotheses, now: Hypotheses, blank: Tensor) -> Tensor:
    """Scores of ``there`` and ``blank``, (N, 2 K), with equal transcripts merged."""
    # (N, now, there)
    same = (now.labels[:, :, None] == there.labels[:, None]).all(-1)
    same &= (there.scores > NO_SCORE)[:, None] & (now.scores > NO_SCORE)[..., None]
    moved = blank[..., None].masked_fill(~same, NO_SCORE)
    scores = torch.cat([there.scores[:, None], moved], 1).logsumexp(1)
    return torch.cat([scores, blank.masked_fill(same.any(2), NO_SCORE)], 1)
