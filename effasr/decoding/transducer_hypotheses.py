"""Hypotheses and frames of a transducer's beam search, over utterances of a batch or streams."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from effasr.decoding.hypothesis import Batched, Hypothesis, NBest, mapped
from effasr.decoding.lm.boosting import BoostTree
from effasr.decoding.streams import BeamStreams
from effasr.model.transducer import Transducer
from effasr.nn.predictor import PredictorState
from effasr_kernels import PackedSequence

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
