"""Hypotheses of a transducer's beam search, over all utterances of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from effasr.decoding.nbest.hypothesis import Hypothesis, NBest
from effasr.model.transducer import Transducer
from effasr.nn.predictor import PredictorState
from effasr_kernels import PackedSequence

NO_SCORE = -torch.inf
"""The score of an empty place of the beam."""


@dataclass(frozen=True, slots=True)
class Utterances:
    """N utterances with at least one frame.

    Attributes:
        names: int64 (N,), the number of each utterance in the batch.
        begins: int64 (N,), the row of its first frame; its frames are counted from there.
        ends: int64 (N,), the row after its last frame.
        limits: int64 (N,), of labels.
    """

    names: Tensor
    begins: Tensor
    ends: Tensor
    limits: Tensor

    @classmethod
    def of(cls, encoded: PackedSequence, limits: Sequence[int]) -> Utterances:
        """Return the utterances of encoder output, without those that have no frame."""
        bounds, lengths = encoded.layout.cu_seqlens.long(), encoded.layout.lengths
        present = [name for name in range(len(limits)) if lengths[name]]
        names = torch.tensor(present, dtype=torch.int64, device=bounds.device)
        most = torch.tensor([limits[name] for name in present], device=bounds.device)
        return cls(names, bounds[names], bounds[names + 1], most)

    def __len__(self) -> int:
        return len(self.names)

    def keep(self, index: Tensor) -> Utterances:
        """Return only these, int64 (M,)."""
        return Utterances(
            self.names[index], self.begins[index], self.ends[index], self.limits[index]
        )


@dataclass(frozen=True, slots=True)
class Hypotheses:
    """K hypotheses of each of N utterances; one with a score of -inf is an empty place.

    Attributes:
        scores: (N, K), log-probabilities.
        counts: int64 (N, K), labels so far; 0 for an empty place.
        labels: int64 (N, K, longest), followed by -1.
        frames: int64 (N, K, longest), the frame at which each label is said on the likeliest path;
            None if the search does not follow them.
        is_new: bool (N, K), whether the predictor has yet to read the last label.
        predicted: (N, K, J), the predictor's share of the joint network.
        state: State of the predictor, (N, K, ...) each.
    """

    scores: Tensor
    counts: Tensor
    labels: Tensor
    frames: Tensor | None
    is_new: Tensor
    predicted: Tensor
    state: PredictorState

    @classmethod
    def begin(cls, head: Transducer, count: int, beam: int, *, with_frames: bool) -> Hypotheses:
        """Return one hypothesis without labels for each of ``count`` utterances."""
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
            predicted=predicted.unflatten(0, shape),
            state=tuple(part.unflatten(0, shape) for part in state),
        )

    def keep(self, index: Tensor) -> Hypotheses:
        """Return only these utterances, int64 (M,)."""
        return mapped(lambda part: part[index], self)

    def pick(self, place: Tensor) -> Hypotheses:
        """Return some hypotheses of each utterance, int64 (N, K)."""
        rows = torch.arange(len(place), device=place.device)[:, None]
        return mapped(lambda part: part[rows, place], self)

    def with_labels(
        self, scores: Tensor, is_label: Tensor, label: Tensor, frame: Tensor
    ) -> Hypotheses:
        """These scores, and one more label where ``is_label``, said at a frame; (N, K) each."""
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

    def read(self, head: Transducer) -> Hypotheses:
        """Let the predictor read the new labels of the hypotheses that are in the beam."""
        rows = (self.is_new & (self.scores > NO_SCORE)).flatten().nonzero()[:, 0]
        if not len(rows):
            return self
        newest = self.labels.gather(2, (self.counts - 1).clamp(min=0)[..., None]).flatten()[rows]
        old = tuple(part.flatten(0, 1)[rows] for part in self.state)
        predicted, state = head.step(newest, old)

        def put(part: Tensor, value: Tensor) -> Tensor:
            flat = part.flatten(0, 1).index_copy(0, rows, value.to(part.dtype))
            return flat.unflatten(0, part.shape[:2])

        return replace(
            self,
            is_new=torch.zeros_like(self.is_new),
            predicted=put(self.predicted, predicted),
            state=tuple(put(part, value) for part, value in zip(self.state, state, strict=True)),
        )

    def record(self, utterances: Utterances, least: Tensor | float, found: NBest) -> None:
        """Record the hypotheses with scores above ``least``, (N, 1) or one number."""
        row, place = (self.scores > least).nonzero(as_tuple=True)
        if len(row):
            names = utterances.names[row].tolist()
            found.add_rows(
                names,
                self.labels[row, place],
                self.scores[row, place],
                frames=None if self.frames is None else self.frames[row, place],
            )


def without_frames(encoded: PackedSequence, count: int, nbest: int) -> NBest:
    """Return the lists of a search, with the empty transcript for utterances without a frame."""
    found = NBest(count, nbest)
    for name, frames in enumerate(encoded.layout.lengths[:count]):
        if not frames:
            found.add(name, Hypothesis((), 0.0, 0.0))
    return found


def mapped(change: Callable[..., Tensor], *several: Hypotheses) -> Hypotheses:
    """Return hypotheses of which every tensor is computed from those of others."""
    parts: dict[str, Any] = {}
    for name in [field.name for field in fields(Hypotheses) if field.name != "state"]:
        own = [getattr(one, name) for one in several]
        parts[name] = None if own[0] is None else change(*own)
    state = tuple(change(*tensors) for tensors in zip(*(one.state for one in several), strict=True))
    return Hypotheses(**parts, state=state)


def put(whole: Hypotheses, index: Tensor, part: Hypotheses) -> Hypotheses:
    """Return hypotheses of which those of some utterances, int64 (M,), are replaced."""
    whole, part = with_equal_room((whole, part))
    return mapped(lambda all_, some: all_.index_copy(0, index, some), whole, part)


def merge_equal(
    scores: Tensor, reached: Hypotheses, label: Tensor, source: Hypotheses, frame: Tensor
) -> tuple[Hypotheses, Tensor]:
    """Add the scores of new labels to hypotheses that already have the same transcript.

    Hypothesis b of ``source`` with one more label is hypothesis a of ``reached`` where b has all
    labels of a but the last, and the new label is that last one.

    Args:
        scores: (N, A), of ``reached``.
        reached: A hypotheses of each utterance.
        label: (N, B, V), scores of each hypothesis of ``source`` with each label.
        source: B hypotheses, with room for as many labels as ``reached``.
        frame: int64 (N, B), at which ``source`` says its next label.

    Returns:
        ``reached`` with ``scores`` and what is added, and the frames of the likeliest way; and
        ``label`` without what is added.
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
        said = likelier_frames(reached, source, origin, is_likelier)
        held = said.gather(2, before_last)[..., 0]
        now = torch.where(is_likelier, frame.gather(1, origin), held)
        merged = replace(merged, frames=said.scatter(2, before_last, now[..., None]))
    kept = torch.where(same, NO_SCORE, torch.inf).to(label.dtype)
    return merged, label.scatter_reduce(2, index, kept, "amin")


def likelier_frames(
    reached: Hypotheses, source: Hypotheses, origin: Tensor, is_likelier: Tensor
) -> Tensor:
    """Return frames of labels: those of hypothesis ``origin``, (N, A), where it is likelier.

    Both hypotheses have frames.
    """
    assert reached.frames is not None
    assert source.frames is not None
    rows = torch.arange(len(origin), device=origin.device)[:, None]
    return torch.where(is_likelier[..., None], source.frames[rows, origin], reached.frames)


def with_equal_room(several: Sequence[Hypotheses]) -> tuple[Hypotheses, ...]:
    """Return hypotheses with room for as many labels as the longest transcript has."""
    longest = max(int(one.counts.max()) for one in several)
    return tuple(
        replace(
            one,
            labels=F.pad(one.labels, (0, longest - one.labels.shape[-1]), value=-1),
            frames=(
                None
                if one.frames is None
                else F.pad(one.frames, (0, longest - one.frames.shape[-1]))
            ),
        )
        for one in several
    )
