"""Beam search of a transducer with durations (TDT), over a packed batch or over streams."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from effasr.decoding.hypothesis import Hypothesis, NBest, mapped
from effasr.decoding.lm.boosting import BoostTree
from effasr.decoding.streams import OpenTranscript, keep_consistent, merged
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


def tdt_beam(
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

    The search is synchronous in frames: hypotheses at the same frame are compared, and each
    transcript has one of them, whose score is the sum over all paths to it that the beam has kept.
    All symbols and durations lead from there to later frames. A label of duration 0 is followed at
    once, unless K hypotheses that have moved on are likelier. With a beam that is wide enough the
    search is exact.

    Paths are those of the loss (`effasr_kernels.transducer_loss`): a blank lasts at least one
    frame, and the last blank ends with the last frame. Greedy search is less strict, and takes
    symbol and duration separately, so a beam of 1 is not the same. With ``boost``, scores have its
    bonuses.
    """
    frames = head.encoder_projection(encoded.values)
    best = new_lists(encoded, len(limits), nbest)
    utterances = UtteranceFrames.from_encoded(encoded, limits)
    first = Hypotheses.begin(head, len(utterances), beam, with_frames=with_frames)
    ahead, passed = _with_empty_frames(head, first), 0
    while len(utterances):
        ahead = _advance(head, frames, utterances, ahead, passed, boost)
        passed += 1
        at_end = utterances.ends - utterances.begins == passed
        index = at_end.nonzero()[:, 0]
        if len(index):
            ended = ahead[0].keep(index).ended(head, boost)
            ended.record(utterances.keep(index), NO_SCORE, best)
            going = (~at_end).nonzero()[:, 0]
            utterances, ahead = utterances.keep(going), tuple(part.keep(going) for part in ahead)
    return best.lists


def _with_empty_frames(head: Transducer, first: Hypotheses) -> tuple[Hypotheses, ...]:
    """Return hypotheses at the first frame, and none at those that a duration leads to."""
    assert head.config.durations is not None
    empty = replace(first, scores=torch.full_like(first.scores, NO_SCORE))
    return first, *[empty] * max(head.config.durations)


def _advance(
    head: Transducer,
    frames: Tensor,  # (T, J), projected
    utterances: UtteranceFrames,
    ahead: Sequence[Hypotheses],  # at this frame, the next one, ... up to the longest duration
    passed: int | Tensor,  # number of earlier frames; int64 (N,) where it differs
    boost: BoostTree | None,
) -> tuple[Hypotheses, ...]:
    """Extend the hypotheses at a frame by all symbols and durations, until all have moved on."""
    now, *later = ahead
    durations = head.config.durations or ()
    beam = now.scores.shape[1]
    row = utterances.begins + passed
    frame, remaining = frames[row][:, None], (utterances.ends - row)[:, None]
    number = (row - utterances.begins)[:, None].expand(-1, beam)
    while (now.scores > NO_SCORE).any():
        now = now.read(head, boost)
        logits = head.logits(frame, now.predicted).to(now.scores.dtype)
        symbols = logits[..., : head.blank_id + 1].log_softmax(-1)
        of_durations = logits[..., head.blank_id + 1 :].log_softmax(-1)
        extended = now.scores[..., None] + symbols
        full = now.counts >= utterances.limits[:, None]
        label, blank = extended[..., :-1].masked_fill(full[..., None], NO_SCORE), extended[..., -1]
        if boost is not None:
            label = label + boost.rows(now.phrases)[..., :-1]
        for index, duration in enumerate(durations):
            if duration:
                score = of_durations[..., index]
                blanks = (blank + score).masked_fill(duration > remaining, NO_SCORE)
                # A label must not reach the end, because a blank must come last.
                past = (duration >= remaining)[..., None]
                labels = (label + score[..., None]).masked_fill(past, NO_SCORE)
                there = later[duration - 1]
                later[duration - 1] = _extended(there, now, blanks, labels, number)
        scores, chosen = (label + of_durations[..., :1]).flatten(1).topk(beam)
        # Later hypotheses cannot become likelier, but for bonuses.
        bar = torch.cat([part.scores for part in later], 1).topk(beam).values[:, -1:]
        scores = scores.masked_fill(scores <= bar, NO_SCORE)
        parent, new = chosen // label.shape[-1], chosen % label.shape[-1]
        now = now.pick(parent).with_labels(scores, scores > NO_SCORE, new, number)
    no_scores = torch.full_like(now.scores, NO_SCORE)
    empty = replace(now, scores=no_scores, counts=torch.zeros_like(now.counts))
    return padded_equally((*later, empty))


def _extended(
    there: Hypotheses,  # at the later frame
    now: Hypotheses,  # at this frame
    blank: Tensor,  # (N, K), scores of ``now`` with a blank
    label: Tensor,  # (N, K, V), scores of ``now`` with each label
    frame: Tensor,  # int64 (N, K), this frame
) -> Hypotheses:
    """Return the best hypotheses at a later frame: existing ones and extensions of current ones."""
    there, now = padded_equally((there, now))
    beam, classes = now.scores.shape[1], label.shape[-1]
    both = mapped(lambda *parts: torch.cat(parts, 1), there, now)
    reached = _with_blanks(there, now, both, blank)
    merged, label = merge_equal(reached.scores, reached, label, now, frame)
    best, chosen = torch.cat([merged.scores, label.flatten(1)], 1).topk(beam)
    new = chosen - 2 * beam
    is_label = new >= 0
    parent = torch.where(is_label, beam + new.div(classes, rounding_mode="floor"), chosen)
    picked = both.pick(parent)
    if picked.frames is not None:
        picked = replace(picked, frames=likelier_frames(picked, merged, parent, ~is_label))
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


class TDTBeamStreams(TransducerStreamsBase):
    """Decodes as `tdt_beam`.

    The last durations of an utterance must not lead beyond its end. So as many frames as the
    longest duration are read only when more come, or the stream ends.
    """

    def _prepare(self, slots: int) -> None:
        self._passed = [0] * slots
        self._ahead = _with_empty_frames(self._head, self._first(slots))

    def _begin(self, slot: int) -> None:
        self._frames.start(slot)
        self._passed[slot] = 0
        self._put([slot], _with_empty_frames(self._head, self._first(1)))

    def _advance(self, encoded: Tensor, frames: Sequence[int]) -> None:
        self._frames.add(encoded, frames)
        longest = len(self._ahead) - 1
        while slots := [
            slot
            for slot, passed in enumerate(self._passed)
            if frames[slot] and passed + longest < self._frames.end(slot)
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
        return _advance(self._head, rows, utterances, ahead, passed, self._boost)

    def _likeliest(self, slots: Sequence[int]) -> list[OpenTranscript]:
        best = [hypotheses[0] for hypotheses in self._lists(slots)]
        return [
            OpenTranscript(hypothesis.tokens, hypothesis.frames, self._passed[slot])
            for slot, hypothesis in zip(slots, best, strict=True)
        ]

    def _hypotheses(self, slot: int) -> list[Hypothesis]:
        return self._lists([slot])[0]

    def _lists(self, slots: Sequence[int]) -> list[list[Hypothesis]]:
        """Return the hypotheses of slots at all frames, with equal transcripts merged."""
        best = NBest(len(slots), self.beam * len(self._ahead))
        _, utterances = self._frames.utterances(slots)
        for hypotheses in self._kept(slots):
            hypotheses.ended(self._head, self._boost).record(utterances, NO_SCORE, best)
        return [merged(hypotheses) for hypotheses in best.lists]

    def _ended(self, slot: int) -> list[Hypothesis]:
        best, ahead = NBest(1, self.nbest), self._kept([slot])
        for more in range(self._frames.end(slot) - self._passed[slot]):
            ahead = self._next([slot], ahead, more)
        _, utterances = self._frames.utterances([slot])
        ahead[0].ended(self._head, self._boost).record(utterances, NO_SCORE, best)
        return best.lists[0]

    def _keep(self, slot: int, final: Sequence[int], since: int) -> None:
        self._frames.commit(slot, since)
        consistent = []
        for hypotheses in self._kept([slot]):
            # The predictor must have read what is final.
            read = hypotheses.read(self._head, self._boost)
            agrees, labels, frames, counts = keep_consistent(
                read.labels, read.frames, read.counts, final, since
            )
            scores = read.scores.masked_fill(~agrees, NO_SCORE)
            consistent.append(
                replace(read, scores=scores, labels=labels, frames=frames, counts=counts)
            )
        base = torch.cat([part.scores for part in consistent], 1).amax(1, keepdim=True)
        self._put([slot], [replace(part, scores=part.scores - base) for part in consistent])

    def _kept(self, slots: Sequence[int]) -> tuple[Hypotheses, ...]:
        index = self._index(slots)
        return tuple(part.keep(index) for part in self._ahead)

    def _put(self, slots: Sequence[int], part: Sequence[Hypotheses]) -> None:
        index = self._index(slots)
        pairs = zip(self._ahead, part, strict=True)
        self._ahead = tuple(put(old, index, new) for old, new in pairs)
