"""Beam search of streams by a transducer with durations (TDT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from effasr.decoding.nbest.hypothesis import Hypothesis, NBest
from effasr.decoding.streaming.beam import OpenTranscript, keep_consistent, merged
from effasr.decoding.streaming.transducer_beam_base import BaseTransducerBeamStreams
from effasr.decoding.tdt_beam import advance
from effasr.decoding.transducer_hypotheses import NO_SCORE, Hypotheses, put


class TDTBeamStreams(BaseTransducerBeamStreams):
    """Decodes as `effasr.decoding.tdt_beam`.

    The last durations of an utterance must not lead beyond its end. So as many frames as the
    longest duration are read only when more come, or the stream ends.
    """

    def _prepare(self, slots: int) -> None:
        assert self._head.config.durations is not None
        self._longest = max(self._head.config.durations)
        self._passed = [0] * slots
        self._ahead = self._first_ahead(slots)

    def _first_ahead(self, count: int) -> tuple[Hypotheses, ...]:
        """Return the hypotheses at the first frames of streams, and at those after them: none."""
        now = self._first(count)
        empty = replace(now, scores=torch.full_like(now.scores, NO_SCORE))
        return now, *[empty] * self._longest

    def _begin(self, slot: int) -> None:
        self._frames.start(slot)
        self._passed[slot] = 0
        self._put([slot], self._first_ahead(1))

    def _advance(self, encoded: Tensor, frames: Sequence[int]) -> None:
        self._frames.add(encoded, frames)
        while slots := [
            slot
            for slot, passed in enumerate(self._passed)
            if frames[slot] and passed + self._longest < self._frames.end(slot)
        ]:
            self._put(slots, self._next(slots, self._kept(slots)))
            for slot in slots:
                self._passed[slot] += 1
        for slot, passed in enumerate(self._passed):
            self._frames.forget(slot, passed)

    def _next(
        self, slots: Sequence[int], ahead: tuple[Hypotheses, ...], more: int = 0
    ) -> tuple[Hypotheses, ...]:
        """Read one frame of each slot, ``more`` after those that are passed."""
        rows, utterances = self._frames.utterances(slots)
        passed = self._index([self._passed[slot] + more for slot in slots])
        return advance(self._head, rows, utterances, ahead, passed)

    def _likeliest(self, slots: Sequence[int]) -> list[OpenTranscript]:
        found = []
        for slot, every in zip(slots, self._lists(slots), strict=True):
            best = every[0]
            found.append(OpenTranscript(best.tokens, best.frames, self._passed[slot]))
        return found

    def _hypotheses(self, slot: int) -> list[Hypothesis]:
        return self._lists([slot])[0]

    def _lists(self, slots: Sequence[int]) -> list[list[Hypothesis]]:
        """Return the hypotheses of slots at all frames, those of a transcript added."""
        found = NBest(len(slots), self.beam * len(self._ahead))
        _, utterances = self._frames.utterances(slots)
        for one in self._kept(slots):
            one.record(utterances, NO_SCORE, found)
        return [merged(every) for every in found.lists()]

    def _ended(self, slot: int) -> list[Hypothesis]:
        found, ahead = NBest(1, self.nbest), self._kept([slot])
        for more in range(self._frames.end(slot) - self._passed[slot]):
            ahead = self._next([slot], ahead, more)
        _, utterances = self._frames.utterances([slot])
        ahead[0].record(utterances, NO_SCORE, found)
        return found.lists()[0]

    def _keep(self, slot: int, final: Sequence[int], since: int) -> None:
        self._frames.commit(slot, since)
        rest = []
        for one in self._kept([slot]):
            # The predictor must have read what is final.
            own = one.read(self._head)
            agrees, labels, frames, counts = keep_consistent(
                own.labels, own.frames, own.counts, final, since
            )
            scores = own.scores.masked_fill(~agrees, NO_SCORE)
            rest.append(replace(own, scores=scores, labels=labels, frames=frames, counts=counts))
        base = torch.cat([one.scores for one in rest], 1).amax(1, keepdim=True)
        self._put([slot], [replace(one, scores=one.scores - base) for one in rest])

    def _kept(self, slots: Sequence[int]) -> tuple[Hypotheses, ...]:
        index = self._index(slots)
        return tuple(one.keep(index) for one in self._ahead)

    def _put(self, slots: Sequence[int], part: Sequence[Hypotheses]) -> None:
        index = self._index(slots)
        pairs = zip(self._ahead, part, strict=True)
        self._ahead = tuple(put(whole, index, some) for whole, some in pairs)
