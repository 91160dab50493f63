"""Beam searches of transducers (RNN-T and TDT), over a packed batch or over streams."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from effasr.decoding.hypothesis import Batched, Hypothesis, NBest, mapped
from effasr.decoding.lm.boosting import BoostTree
from effasr.decoding.streams import BeamStreams, OpenTranscript, keep_consistent, merged, opened
from effasr.model.transducer import Transducer
from effasr.nn.predictor import PredictorState
from effasr_kernels import PackedSequence

# Hypotheses and frames of a transducer's beam search, over utterances of a batch or streams.


NO_SCORE = -torch.inf  # of an empty place of the beam


@dataclass(frozen=True, slots=True)
class UtteranceFrames(Batched):
    """N utterances with at least one frame, int64 (N,) each."""

    names: Tensor  # number of each utterance in the batch
    begins: Tensor  # row of its first frame; its frames are counted from there
    ends: Tensor  # row after its last frame
    limits: Tensor  # of labels

    @classmethod
    def from_encoded(cls, encoded: PackedSequence, limits: Sequence[int]) -> UtteranceFrames:
        bounds, lengths = encoded.layout.cu_seqlens.long(), encoded.layout.lengths
        present = [name for name in range(len(limits)) if lengths[name]]
        names = torch.tensor(present, dtype=torch.int64, device=bounds.device)
        most = torch.tensor([limits[name] for name in present], device=bounds.device)
        return cls(names, bounds[names], bounds[names + 1], most)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True)
class Hypotheses(Batched):
    """K hypotheses of each of N utterances; one with a score of -inf is an empty place."""

    scores: Tensor  # (N, K), log-probabilities and bonuses of the labels
    counts: Tensor  # int64 (N, K), labels so far; 0 for an empty place
    labels: Tensor  # int64 (N, K, longest), followed by -1
    # int64 (N, K, longest), the frame of each label on the likeliest path; None if not followed.
    frames: Tensor | None
    is_new: Tensor  # bool (N, K), whether the predictor has yet to read the last label
    phrases: Tensor  # int64 (N, K), states of the bonuses after the labels that are read
    predicted: Tensor  # (N, K, J), the predictor's share of the joint network
    state: PredictorState  # (N, K, ...) each

    @classmethod
    def begin(cls, head: Transducer, count: int, beam: int, *, with_frames: bool) -> Hypotheses:
        predicted, state = head.begin(count * beam)
        shape = count, beam
        wide = torch.float64 if predicted.dtype == torch.float64 else torch.float32
        scores = torch.full(shape, NO_SCORE, dtype=wide, device=predicted.device)
        scores[:, 0] = 0
        counts = torch.zeros(shape, dtype=torch.int64, device=predicted.device)
        empty = counts.new_empty(*shape, 0)
        return cls(
            scores=scores,
            counts=counts,
            labels=empty,
            frames=empty if with_frames else None,
            is_new=counts.bool(),
            phrases=counts.clone(),
            predicted=predicted.unflatten(0, shape),
            state=tuple(part.unflatten(0, shape) for part in state),
        )

    def pick(self, chosen: Tensor) -> Hypotheses:
        """Return some hypotheses of each utterance, int64 (N, K)."""
        rows = torch.arange(len(chosen), device=chosen.device)[:, None]
        return mapped(lambda part: part[rows, chosen], self)

    def with_labels(
        self, scores: Tensor, is_label: Tensor, label: Tensor, frame: Tensor
    ) -> Hypotheses:
        """These scores, and one more label where ``is_label``, in a frame; (N, K) each."""
        padded, frames = F.pad(self.labels, (0, 1), value=-1), self.frames
        if frames is not None:
            frames = F.pad(frames, (0, 1)).scatter(2, self.counts[..., None], frame[..., None])
        # Without a new label, the position after the last one keeps its value.
        new = torch.where(is_label, label, -1)[..., None]
        return replace(
            self,
            scores=scores,
            counts=(self.counts + is_label).masked_fill(scores == NO_SCORE, 0),
            labels=padded.scatter(2, self.counts[..., None], new),
            frames=frames,
            is_new=self.is_new | is_label,
        )

    def read(self, head: Transducer, boost: BoostTree | None = None) -> Hypotheses:
        """Let the predictor read the new labels of the hypotheses that are in the beam."""
        rows = (self.is_new & (self.scores > NO_SCORE)).flatten().nonzero()[:, 0]
        if not len(rows):
            return self
        newest = self.labels.gather(2, (self.counts - 1).clamp(min=0)[..., None]).flatten()[rows]
        old = tuple(part.flatten(0, 1)[rows] for part in self.state)
        predicted, state = head.step(newest, old)

        def updated(part: Tensor, value: Tensor) -> Tensor:
            flat = part.flatten(0, 1).index_copy(0, rows, value.to(part.dtype))
            return flat.unflatten(0, part.shape[:2])

        phrases = self.phrases
        if boost is not None:
            phrases = updated(phrases, boost.advanced(phrases.flatten()[rows], newest))
        return replace(
            self,
            is_new=torch.zeros_like(self.is_new),
            phrases=phrases,
            predicted=updated(self.predicted, predicted),
            state=tuple(updated(old, new) for old, new in zip(self.state, state, strict=True)),
        )

    def ended(self, head: Transducer, boost: BoostTree | None) -> Hypotheses:
        """Return them as transcripts, which have no bonus of what is not complete."""
        if boost is None:
            return self
        read = self.read(head, boost)
        return replace(read, scores=read.scores + boost.ends(read.phrases))

    def record(self, utterances: UtteranceFrames, least: Tensor | float, best: NBest) -> None:
        """Record the hypotheses with scores above ``least``, (N, 1) or one number."""
        row, column = (self.scores > least).nonzero(as_tuple=True)
        if len(row):
            best.add_rows(
                utterances.names[row].tolist(),
                self.labels[row, column],
                self.scores[row, column],
                frames=None if self.frames is None else self.frames[row, column],
            )


class UnreadFrames:
    """The last frames of each slot, which not all hypotheses have read, projected for the joint."""

    def __init__(self, head: Transducer, slots: int, limit: Callable[[int], int]):
        self._head, self._limit = head, limit
        weight = head.output.weight
        self._device = weight.device
        self._none = weight.new_empty(0, head.config.joint)
        self._rows = [self._none] * slots
        self._first = [0] * slots
        self._since = [0] * slots

    def start(self, slot: int) -> None:
        self._rows[slot] = self._none
        self._first[slot] = self._since[slot] = 0

    def add(self, encoded: Tensor, frames: Sequence[int]) -> None:
        """Add the first ``frames`` of encoder output (S, c, encoder width) to each slot."""
        projected = self._head.encoder_projection(encoded)
        for slot, count in enumerate(frames):
            if count:
                self._rows[slot] = torch.cat([self._rows[slot], projected[slot, :count]])

    def end(self, slot: int) -> int:
        """Return the number of frames of a stream so far, read or not."""
        return self._first[slot] + len(self._rows[slot])

    def forget(self, slot: int, before: int) -> None:
        # A view would keep all of them alive.
        self._rows[slot] = self._rows[slot][before - self._first[slot] :].clone()
        self._first[slot] = before

    def commit(self, slot: int, since: int) -> None:
        """Count the frames of the open transcript from one on."""
        self._since[slot] = since

    def utterances(self, slots: Sequence[int]) -> tuple[Tensor, UtteranceFrames]:
        """Return the frames of slots, (T, J), and the bounds of each among them.

        The utterances begin with the first frame of their streams, so that frames are numbered as
        in these, although the row of a frame that is forgotten does not exist.
        """
        begins, ends, row = [], [], 0
        for slot in slots:
            begins.append(row - self._first[slot])
            row += len(self._rows[slot])
            ends.append(row)
        limits = [self._limit(self.end(slot) - self._since[slot]) for slot in slots]
        numbers = torch.tensor([list(range(len(slots))), begins, ends, limits])
        return torch.cat([self._rows[slot] for slot in slots]), UtteranceFrames(
            *numbers.to(self._device)
        )


class TransducerStreamsBase(BeamStreams):
    """Base of the beam searches of streams by transducers with and without durations."""

    def __init__(
        self,
        head: Transducer,
        slots: int,
        beam: int,
        nbest: int,
        # Most labels of an open transcript of so many frames. One that reaches it before later
        # frames have come may be another one than that of the whole utterance.
        limit: Callable[[int], int],
        boost: BoostTree | None = None,
    ):
        super().__init__(head, slots, beam, nbest)
        self._head, self._frames = head, UnreadFrames(head, slots, limit)
        self._boost = boost
        with torch.inference_mode():
            self._prepare(slots)

    @abstractmethod
    def _prepare(self, slots: int) -> None:
        """Make the state of a number of streams that have no frames."""

    def _first(self, count: int) -> Hypotheses:
        return Hypotheses.begin(self._head, count, self.beam, with_frames=True)


def new_lists(encoded: PackedSequence, count: int, nbest: int) -> NBest:
    """Return the lists of a search, with the empty transcript for utterances without a frame."""
    best = NBest(count, nbest)
    for name, frames in enumerate(encoded.layout.lengths[:count]):
        if not frames:
            best.add(name, Hypothesis((), 0.0, 0.0))
    return best


def put(whole: Hypotheses, index: Tensor, part: Hypotheses) -> Hypotheses:
    """Replace the hypotheses of some utterances, int64 (M,)."""
    whole, part = padded_equally((whole, part))
    return mapped(lambda old, new: old.index_copy(0, index, new), whole, part)


def merge_equal(
    scores: Tensor,  # (N, A), of ``reached``
    reached: Hypotheses,  # A of each utterance
    label: Tensor,  # (N, B, V), scores of each hypothesis of ``source`` with each label
    source: Hypotheses,  # B of each utterance, padded as ``reached``
    frame: Tensor,  # int64 (N, B), of the next label of ``source``
) -> tuple[Hypotheses, Tensor]:
    """Add the scores of new labels to hypotheses that already have the same transcript.

    Hypothesis b of ``source`` with one more label is hypothesis a of ``reached`` where b has all
    labels of a but the last, and the new label is that last one. Returns ``reached`` with the sums
    and the frames of the likeliest way, and ``label`` without what is added.
    """
    if not reached.labels.shape[-1]:
        return replace(reached, scores=scores), label
    before_last = (reached.counts - 1).clamp(min=0)[..., None]
    last = reached.labels.gather(2, before_last)[..., 0]
    shortened = reached.labels.scatter(2, before_last, -1)
    # (N, B, A)
    same = (source.labels[:, :, None] == shortened[:, None]).all(-1)
    same &= source.counts[:, :, None] + 1 == reached.counts[:, None]
    same &= (reached.scores > NO_SCORE)[:, None] & (source.scores > NO_SCORE)[..., None]
    index = last.clamp(min=0)[:, None].expand(same.shape)
    moved = label.gather(2, index).masked_fill(~same, NO_SCORE)
    merged = replace(reached, scores=torch.cat([scores[:, None], moved], 1).logsumexp(1))
    if reached.frames is not None:
        likeliest, origin = moved.max(1)
        is_likelier = likeliest > scores
        frames = likelier_frames(reached, source, origin, is_likelier)
        held = frames.gather(2, before_last)[..., 0]
        now = torch.where(is_likelier, frame.gather(1, origin), held)
        merged = replace(merged, frames=frames.scatter(2, before_last, now[..., None]))
    unmoved = torch.where(same, NO_SCORE, torch.inf).to(label.dtype)
    return merged, label.scatter_reduce(2, index, unmoved, "amin")


def likelier_frames(
    reached: Hypotheses, source: Hypotheses, origin: Tensor, is_likelier: Tensor
) -> Tensor:
    """Return the frames of ``reached``, or of hypothesis ``origin``, (N, A), where likelier."""
    assert reached.frames is not None
    assert source.frames is not None
    rows = torch.arange(len(origin), device=origin.device)[:, None]
    return torch.where(is_likelier[..., None], source.frames[rows, origin], reached.frames)


def padded_equally(several: Sequence[Hypotheses]) -> tuple[Hypotheses, ...]:
    longest = max(int(hypotheses.counts.max()) for hypotheses in several)

    def padded(hypotheses: Hypotheses) -> Hypotheses:
        missing, frames = (0, longest - hypotheses.labels.shape[-1]), hypotheses.frames
        return replace(
            hypotheses,
            labels=F.pad(hypotheses.labels, missing, value=-1),
            frames=None if frames is None else F.pad(frames, missing),
        )

    return tuple(padded(hypotheses) for hypotheses in several)


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


# Beam search of a transducer with durations (TDT), over a packed batch or over streams.


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
        ahead = _advance_frame(head, frames, utterances, ahead, passed, boost)
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


def _advance_frame(
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
        return _advance_frame(self._head, rows, utterances, ahead, passed, self._boost)

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
