"""Beam search of a transducer (RNN-T), over a packed batch or over streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from effasr.decoding.hypothesis import Batched, Hypothesis, NBest
from effasr.decoding.lm.boosting import BoostTree
from effasr.decoding.streams import OpenTranscript, keep_consistent, opened
from effasr.decoding.transducer_hypotheses import (
    NO_SCORE,
    Hypotheses,
    TransducerStreamsBase,
    UtteranceFrames,
    likelier_frames,
    merge_equal,
    new_lists,
    padded_equally,
    put,
)
from effasr.model.transducer import Transducer
from effasr_kernels import PackedSequence


def transducer_beam(
    head: Transducer,
    encoded: PackedSequence,  # (T, encoder width), from ``model.encode``
    beam: int,
    limits: Sequence[int],  # most labels of each transcript
    nbest: int = 1,
    *,
    boost: BoostTree | None = None,
    with_frames: bool = False,  # whether hypotheses have the frames of their labels: slower
) -> list[list[Hypothesis]]:
    """Find the likeliest transcripts of each sequence, the best first; for an empty one, no labels.

    Step i compares hypotheses with t frames read and u labels, t + u = i. In each step a transcript
    has one hypothesis, whose score is the sum over all paths to it that the beam has kept: paths
    that end with a blank and paths that end with the last label are added. So the search is exact
    with a beam that is wide enough, and greedy without a limit on the labels of a frame with a beam
    of 1. With ``boost``, scores have its bonuses, and open hypotheses are assumed to gain at most
    that of one more phrase.

    Saon et al., 2020, https://ieeexplore.ieee.org/document/9053040 (alignment-length synchronous).
    """
    frames = head.encoder_projection(encoded.values)
    best = new_lists(encoded, len(limits), nbest)
    utterances = UtteranceFrames.from_encoded(encoded, limits)
    hypotheses = Hypotheses.begin(head, len(utterances), beam, with_frames=with_frames)
    search = _BeamState(
        utterances,
        hypotheses.scores.new_full((len(utterances), nbest), NO_SCORE),
        utterances.begins[:, None].expand(-1, beam),
        hypotheses,
    )
    _finish(head, frames, search, best, boost)
    return best.lists


@dataclass(frozen=True, slots=True)
class _BeamState(Batched):
    utterances: UtteranceFrames
    best: Tensor  # (N, nbest), scores of the likeliest complete hypotheses, the best first
    at: Tensor  # int64 (N, K), the row of the next frame of each hypothesis
    hypotheses: Hypotheses

    def in_range(self) -> _BeamState:
        """Let empty places, which count for nothing, read a frame that exists."""
        return replace(self, at=torch.minimum(self.at, (self.utterances.ends - 1)[:, None]))


def _finish(
    head: Transducer, frames: Tensor, search: _BeamState, best: NBest, boost: BoostTree | None
) -> None:
    search = _recorded(head, search, best, boost)
    while len(search.utterances):
        search = _recorded(head, _advance(head, frames, search, boost), best, boost)


def _advance(
    head: Transducer, frames: Tensor, search: _BeamState, boost: BoostTree | None
) -> _BeamState:
    """Extend every hypothesis by the blank and by each label, and keep the K best."""
    before = search.hypotheses
    logits = head.logits(frames[search.at], before.predicted)
    steps = logits.to(before.scores.dtype).log_softmax(-1)
    label, blank = before.scores[..., None] + steps[..., :-1], before.scores + steps[..., -1]
    if boost is not None:
        label = label + boost.rows(before.phrases)[..., :-1]
    full = before.counts >= search.utterances.limits[:, None]
    label = label.masked_fill(full[..., None], NO_SCORE)
    now = search.at - search.utterances.begins[:, None]
    merged, label = merge_equal(blank, before, label, before, now)
    pool = torch.cat([label, merged.scores[..., None]], -1)
    scores, chosen = pool.flatten(1).topk(before.scores.shape[1])
    parent, symbol = chosen // pool.shape[-1], chosen % pool.shape[-1]
    is_label = (symbol != head.blank_id) & (scores > NO_SCORE)
    picked = before.pick(parent)
    if before.frames is not None:
        likelier = likelier_frames(picked, merged, parent, symbol == head.blank_id)
        picked = replace(picked, frames=likelier)
    after = picked.with_labels(scores, is_label, symbol, now.gather(1, parent))
    return replace(
        search,
        at=search.at.gather(1, parent) + (symbol == head.blank_id),
        hypotheses=after.read(head, boost),
    )


def _recorded(
    head: Transducer, search: _BeamState, best: NBest, boost: BoostTree | None
) -> _BeamState:
    """Record complete hypotheses, and drop utterances that no other hypothesis can improve."""
    hypotheses = search.hypotheses
    complete = search.at == search.utterances.ends[:, None]
    ended = hypotheses.ended(head, boost)
    ended = replace(ended, scores=ended.scores.masked_fill(~complete, NO_SCORE))
    ended.record(search.utterances, search.best[:, -1:], best)
    scores = torch.cat([search.best, ended.scores], 1).topk(best.size).values
    open_scores = hypotheses.scores.masked_fill(complete, NO_SCORE)
    # The sum of the remaining scores bounds the score of any transcript still reachable.
    gain = 0.0 if boost is None else boost.largest
    going = (open_scores.logsumexp(1) + gain > scores[:, -1]).nonzero()[:, 0]
    remainder = replace(search, best=scores, hypotheses=replace(hypotheses, scores=open_scores))
    return remainder.in_range().keep(going)


class TransducerBeamStreams(TransducerStreamsBase):
    """Decodes as `transducer_beam`.

    That search compares hypotheses of as many frames and labels together, so it continues while no
    hypothesis has read all frames of the stream, and those with more labels have read less.
    """

    def _prepare(self, slots: int) -> None:
        self._beams = self._first(slots)
        self._at = torch.zeros_like(self._beams.counts)

    def _begin(self, slot: int) -> None:
        self._frames.start(slot)
        self._at[slot] = 0
        self._beams = put(self._beams, self._index([slot]), self._first(1))

    def _advance(self, encoded: Tensor, frames: Sequence[int]) -> None:
        self._frames.add(encoded, frames)
        slots = [slot for slot, count in enumerate(frames) if count]
        rows, search = self._search(slots)
        while len(index := _unfinished(search)):
            if len(index) == len(slots):
                search = _advance(self._head, rows, search.in_range(), self._boost)
            else:
                part = search.keep(index).in_range()
                part = _advance(self._head, rows, part, self._boost)
                search = replace(
                    search,
                    at=search.at.index_copy(0, index, part.at),
                    hypotheses=put(search.hypotheses, index, part.hypotheses),
                )
        hypotheses, at = search.hypotheses, search.at - search.utterances.begins[:, None]
        ends = [self._frames.end(slot) for slot in slots]
        # An empty place reads no frame.
        at = torch.where(hypotheses.scores > NO_SCORE, at, self._index(ends)[:, None])
        for slot, first in zip(slots, at.amin(1).tolist(), strict=True):
            self._frames.forget(slot, first)
        self._at[self._index(slots)] = at
        (self._beams,) = padded_equally((put(self._beams, self._index(slots), hypotheses),))

    def _search(self, slots: Sequence[int]) -> tuple[Tensor, _BeamState]:
        """Return the unread frames of slots, and the search that reads them."""
        rows, utterances = self._frames.utterances(slots)
        index = self._index(slots)
        part = self._beams.keep(index)
        best = part.scores.new_full((len(slots), self.nbest), NO_SCORE)
        return rows, _BeamState(
            utterances, best, self._at[index] + utterances.begins[:, None], part
        )

    def _likeliest(self, slots: Sequence[int]) -> list[OpenTranscript]:
        index = self._index(slots)
        part = self._beams.keep(index)
        best = part.ended(self._head, self._boost).scores.argmax(1)
        return opened(part.labels, part.frames, best, self._at[index, best].tolist())

    def _hypotheses(self, slot: int) -> list[Hypothesis]:
        best = NBest(1, self.beam)
        _, search = self._search([slot])
        ended = search.hypotheses.ended(self._head, self._boost)
        ended.record(search.utterances, NO_SCORE, best)
        return best.lists[0]

    def _ended(self, slot: int) -> list[Hypothesis]:
        best = NBest(1, self.nbest)
        _finish(self._head, *self._search([slot]), best, self._boost)
        return best.lists[0]

    def _keep(self, slot: int, final: Sequence[int], since: int) -> None:
        self._frames.commit(slot, since)
        part = self._beams.keep(self._index([slot]))
        agrees, labels, frames, counts = keep_consistent(
            part.labels, part.frames, part.counts, final, since
        )
        scores = part.scores.masked_fill(~agrees, NO_SCORE)
        consistent = replace(
            part, scores=scores - scores.amax(1), labels=labels, frames=frames, counts=counts
        )
        self._beams = put(self._beams, self._index([slot]), consistent)


def _unfinished(search: _BeamState) -> Tensor:
    """Return the utterances of which no hypothesis has read all frames, int64 (M,)."""
    at_end = search.at >= search.utterances.ends[:, None]
    at_end &= search.hypotheses.scores > NO_SCORE
    return (~at_end.any(1)).nonzero()[:, 0]
