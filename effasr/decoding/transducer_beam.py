"""Beam search with a transducer, over all utterances of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from effasr.model.transducer import Transducer
from effasr.nn.predictor import PredictorState
from effasr_kernels import PackedSequence

_NONE = -torch.inf


def transducer_beam(
    head: Transducer, encoded: PackedSequence, beam: int, limits: Sequence[int]
) -> list[list[int]]:
    """Find the likeliest transcript of each sequence of encoder output.

    Step i compares hypotheses that have read t frames and said u labels with t + u = i. There, each
    transcript has one hypothesis, whose score is the sum over all paths to it that the beam has
    kept: a path that ends with a blank and one that ends with the last label are added up. So with
    a beam that is wide enough the search is exact, and with a beam of 1 it is greedy search
    without a bound on the labels of a frame.

    Args:
        head: Of the model.
        encoded: (T, encoder width), from ``model.encode``.
        beam: K, the hypotheses that are kept of each sequence.
        limits: The most labels of each sequence's transcript.

    Returns:
        The labels of each sequence; none for an empty one.

    References:
        Saon et al., 2020, https://ieeexplore.ieee.org/document/9053040 (alignment-length
        synchronous decoding).
    """
    frames = head.encoder_projection(encoded.values)
    found: list[list[int]] = [[] for _ in limits]
    lengths = encoded.layout.lengths[: len(found)]
    names = [name for name, length in enumerate(lengths) if length]
    search = _Search.begin(head, encoded, names, limits, beam)
    while len(search.names):
        search = _recorded(_advance(head, frames, search), found)
    return found


@dataclass(frozen=True, slots=True)
class _Search:
    """N utterances with K hypotheses each; one of score -inf is none.

    Attributes:
        names: int64 (N,), the number of each utterance in the batch.
        end: int64 (N,), the row after its last frame.
        limits: int64 (N,), of labels.
        best: (N,), score of the likeliest complete hypothesis so far.
        scores: (N, K), log-probabilities.
        at: int64 (N, K), the row of the frame each looks at.
        counts: int64 (N, K), labels so far.
        labels: int64 (N, K, longest), -1 after them.
        predicted: (N, K, J), the predictor's share of the joint.
        state: Of the predictor, (N, K, ...) each.
    """

    names: Tensor
    end: Tensor
    limits: Tensor
    best: Tensor
    scores: Tensor
    at: Tensor
    counts: Tensor
    labels: Tensor
    predicted: Tensor
    state: PredictorState

    @classmethod
    def begin(
        cls,
        head: Transducer,
        encoded: PackedSequence,
        names: Sequence[int],
        limits: Sequence[int],
        beam: int,
    ) -> _Search:
        """One hypothesis for each of these utterances, which has said nothing."""
        number = torch.tensor(names, dtype=torch.int64, device=encoded.values.device)
        bounds = encoded.layout.cu_seqlens.long()
        predicted, state = head.begin(len(names) * beam)
        shape = len(names), beam
        at = bounds[number][:, None].expand(shape)
        wide = torch.float64 if predicted.dtype == torch.float64 else torch.float32
        scores = torch.full(shape, _NONE, dtype=wide, device=at.device)
        scores[:, 0] = 0
        return cls(
            names=number,
            end=bounds[number + 1],
            limits=torch.tensor([limits[name] for name in names], device=at.device),
            best=scores[:, 0] + _NONE,
            scores=scores,
            at=at,
            counts=torch.zeros_like(at),
            labels=at.new_empty(*shape, 0),
            predicted=predicted.unflatten(0, shape),
            state=tuple(part.unflatten(0, shape) for part in state),
        )

    def keep(self, index: Tensor) -> _Search:
        """These utterances alone, int64 (M,)."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        state = tuple(part[index] for part in parts.pop("state"))
        return _Search(**{name: part[index] for name, part in parts.items()}, state=state)


def _advance(head: Transducer, frames: Tensor, search: _Search) -> _Search:
    """Extend every hypothesis by the blank and by each label, and keep the K best."""
    logits = head.logits(frames[search.at], search.predicted)
    steps = logits.to(search.scores.dtype).log_softmax(-1)
    label, blank = search.scores[..., None] + steps[..., :-1], search.scores + steps[..., -1]
    full = search.counts >= search.limits[:, None]
    blank, label = _joined(search, blank, label.masked_fill(full[..., None], _NONE))
    pool = torch.cat([label, blank[..., None]], -1)
    scores, chosen = pool.flatten(1).topk(search.scores.shape[1])
    parent, symbol = chosen // pool.shape[-1], chosen % pool.shape[-1]
    is_label = (symbol != head.blank_id) & (scores > _NONE)
    counts = search.counts.gather(1, parent)
    said = F.pad(_of(search.labels, parent), (0, 1), value=-1)
    # Where there is no new label, the place after the last one is overwritten with what it holds.
    place = counts[..., None]
    said = said.scatter(2, place, torch.where(is_label, symbol, -1)[..., None])
    predicted, state = _of(search.predicted, parent), [_of(part, parent) for part in search.state]
    rows = is_label.flatten().nonzero()[:, 0]
    if len(rows):
        old = tuple(part.flatten(0, 1)[rows] for part in state)
        new, changed = head.step(symbol.flatten()[rows], old)
        predicted.flatten(0, 1)[rows] = new.to(predicted.dtype)
        for part, value in zip(state, changed, strict=True):
            part.flatten(0, 1)[rows] = value.to(part.dtype)
    return replace(
        search,
        scores=scores,
        at=search.at.gather(1, parent) + (symbol == head.blank_id),
        counts=counts + is_label,
        labels=said,
        predicted=predicted,
        state=tuple(state),
    )


def _joined(search: _Search, blank: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Move what leads to the same transcript from the labels' scores to the blanks'.

    Hypothesis a and a blank, and hypothesis b and a label, are one where b has all labels of a but
    the last.

    Args:
        search: Before the step.
        blank: (N, K).
        label: (N, K, V).
    """
    labels, counts = search.labels, search.counts
    if not labels.shape[-1]:
        return blank, label
    before_last = (counts - 1).clamp(min=0)[..., None]
    last = labels.gather(2, before_last)[..., 0]
    shortened = labels.scatter(2, before_last, -1)
    alive = search.scores > _NONE
    # (N, b, a)
    same = (labels[:, :, None] == shortened[:, None]).all(-1)
    same &= (counts[:, :, None] + 1 == counts[:, None]) & alive[:, :, None] & alive[:, None]
    index = last.clamp(min=0)[:, None].expand(same.shape)
    moved = label.gather(2, index).masked_fill(~same, _NONE)
    blank = torch.cat([blank[:, None], moved], 1).logsumexp(1)
    kept = torch.where(same, _NONE, torch.inf).to(label.dtype)
    return blank, label.scatter_reduce(2, index, kept, "amin")


def _recorded(search: _Search, found: list[list[int]]) -> _Search:
    """Take complete hypotheses out of the beam, and utterances that none can improve any more."""
    complete = (search.at == search.end[:, None]) & (search.scores > _NONE)
    scores, winner = search.scores.masked_fill(~complete, _NONE).max(1)
    better = (scores > search.best).nonzero()[:, 0]
    transcripts = search.labels[better, winner[better]].tolist()
    for name, labels in zip(search.names[better].tolist(), transcripts, strict=True):
        found[name] = [label for label in labels if label >= 0]
    best = torch.maximum(search.best, scores)
    scores = search.scores.masked_fill(complete, _NONE)
    # All that is left together bounds what any transcript can still get.
    going = (scores.logsumexp(1) > best).nonzero()[:, 0]
    last = (search.end - 1)[:, None]
    at = torch.minimum(search.at, last)
    return replace(search, best=best, scores=scores, at=at).keep(going)


def _of(x: Tensor, parent: Tensor) -> Tensor:
    """The parents' values: (N, K, ...) and int64 (N, K) to (N, K, ...)."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], parent]
