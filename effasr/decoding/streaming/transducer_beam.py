"""Beam search of streams by a transducer (RNN-T)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from effasr.decoding.nbest.hypothesis import Hypothesis, NBest
from effasr.decoding.streaming.beam import OpenTranscript, keep_consistent, opened
from effasr.decoding.streaming.transducer_beam_base import BaseTransducerBeamStreams
from effasr.decoding.transducer_beam import Search, advance, recorded
from effasr.decoding.transducer_hypotheses import NO_SCORE, put, with_equal_room


class TransducerBeamStreams(BaseTransducerBeamStreams):
    """Decodes as `effasr.decoding.transducer_beam`.

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
        while len(index := _can_go_on(search)):
            if len(index) == len(slots):
                search = advance(self._head, rows, _in_range(search))
            else:
                own = _in_range(_keep(search, index))
                search = _put(search, index, advance(self._head, rows, own))
        own, at = search.hypotheses, search.at - search.utterances.begins[:, None]
        ends = [self._frames.end(slot) for slot in slots]
        # An empty place reads no frame.
        at = torch.where(own.scores > NO_SCORE, at, self._index(ends)[:, None])
        for slot, first in zip(slots, at.amin(1).tolist(), strict=True):
            self._frames.forget(slot, first)
        self._at[self._index(slots)] = at
        (self._beams,) = with_equal_room((put(self._beams, self._index(slots), own),))

    def _search(self, slots: Sequence[int]) -> tuple[Tensor, Search]:
        """Return the unread frames of slots, and the search that reads them."""
        rows, utterances = self._frames.utterances(slots)
        index = self._index(slots)
        own = self._beams.keep(index)
        best = own.scores.new_full((len(slots), self.nbest), NO_SCORE)
        return rows, Search(utterances, best, self._at[index] + utterances.begins[:, None], own)

    def _likeliest(self, slots: Sequence[int]) -> list[OpenTranscript]:
        index = self._index(slots)
        own = self._beams.keep(index)
        best = own.scores.argmax(1)
        reads = self._at[index, best].tolist()
        return opened(own.labels, own.frames, best, reads)

    def _hypotheses(self, slot: int) -> list[Hypothesis]:
        found = NBest(1, self.beam)
        _, search = self._search([slot])
        search.hypotheses.record(search.utterances, NO_SCORE, found)
        return found.lists()[0]

    def _ended(self, slot: int) -> list[Hypothesis]:
        found = NBest(1, self.nbest)
        rows, search = self._search([slot])
        search = recorded(search, found)
        while len(search.utterances):
            search = recorded(advance(self._head, rows, search), found)
        return found.lists()[0]

    def _keep(self, slot: int, final: Sequence[int], since: int) -> None:
        self._frames.commit(slot, since)
        own = self._beams.keep(self._index([slot]))
        agrees, labels, frames, counts = keep_consistent(
            own.labels, own.frames, own.counts, final, since
        )
        scores = own.scores.masked_fill(~agrees, NO_SCORE)
        rest = replace(
            own, scores=scores - scores.amax(1), labels=labels, frames=frames, counts=counts
        )
        self._beams = put(self._beams, self._index([slot]), rest)


def _can_go_on(search: Search) -> Tensor:
    """Return the utterances of which no hypothesis has read all frames, int64 (M,)."""
    at_end = search.at >= search.utterances.ends[:, None]
    at_end &= search.hypotheses.scores > NO_SCORE
    return (~at_end.any(1)).nonzero()[:, 0]


def _in_range(search: Search) -> Search:
    """Let empty places, which count for nothing, read a frame that exists."""
    return replace(search, at=torch.minimum(search.at, (search.utterances.ends - 1)[:, None]))


def _keep(search: Search, index: Tensor) -> Search:
    """Return the search of some utterances."""
    return Search(
        search.utterances.keep(index),
        search.best[index],
        search.at[index],
        search.hypotheses.keep(index),
    )


def _put(search: Search, index: Tensor, part: Search) -> Search:
    """Return a search in which some utterances have gone on."""
    return replace(
        search,
        at=search.at.index_copy(0, index, part.at),
        hypotheses=put(search.hypotheses, index, part.hypotheses),
    )
