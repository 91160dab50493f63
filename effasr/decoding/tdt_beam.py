"""Beam search with a transducer with durations (TDT), over all utterances of a batch at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from effasr.model.transducer import Transducer
from effasr.nn.predictor import PredictorState
from effasr_kernels import PackedSequence

_NONE = -torch.inf


def tdt_beam(
    head: Transducer, encoded: PackedSequence, beam: int, limits: Sequence[int]
) -> list[list[int]]:
    """Find the likeliest transcript of each sequence of encoder output.

    Frame by frame, hypotheses that have come to the same frame are compared, whichever way they
    took: each transcript has one there, whose score is the sum over all paths to it that the beam
    has kept. From there all symbols and durations lead on, to frames that are looked at later.
    A label that lasts no frame is followed at once, unless K hypotheses that have gone on are
    likelier. With a beam that is wide enough the search is exact.

    Paths are those of the loss (`effasr_kernels.transducer_loss`): a blank lasts a frame at least,
    and the last blank ends with the last frame. Greedy search is more lenient, and takes symbol and
    duration one after the other; a beam of 1 is not the same.

    Args:
        head: Of the model, with durations.
        encoded: (T, encoder width), from ``model.encode``.
        beam: K, the hypotheses that are kept of each sequence for each frame.
        limits: The most labels of each sequence's transcript.

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
class _Hypotheses:
    """K of each of N utterances that have come to the same frame; one of score -inf is none.

    Attributes:
        scores: (N, K), log-probabilities.
        counts: int64 (N, K), labels so far; 0 of none.
        labels: int64 (N, K, longest), -1 after them.
        is_new: bool (N, K), whether the predictor has yet to read the last label.
        predicted: (N, K, J), the predictor's share of the joint.
        state: Of the predictor, (N, K, ...) each.
    """

    scores: Tensor
    counts: Tensor
    labels: Tensor
    is_new: Tensor
    predicted: Tensor
    state: PredictorState

    def keep(self, index: Tensor) -> _Hypotheses:
        """Of these utterances alone, int64 (M,)."""
        return _mapped(lambda part: part[index], self)

    def pick(self, place: Tensor) -> _Hypotheses:
        """Some of each utterance's, int64 (N, K)."""
        rows = torch.arange(len(place), device=place.device)[:, None]
        return _mapped(lambda part: part[rows, place], self)

    def with_labels(self, scores: Tensor, is_label: Tensor, label: Tensor) -> _Hypotheses:
        """With these scores, and one more label where there is one; (N, K) each."""
        said = F.pad(self.labels, (0, 1), value=-1)
        # Without a new label, the place after the last one is overwritten with what it holds.
        new = torch.where(is_label, label, -1)[..., None]
        return replace(
            self,
            scores=scores,
            counts=(self.counts + is_label).masked_fill(scores == _NONE, 0),
            labels=said.scatter(2, self.counts[..., None], new),
            is_new=self.is_new | is_label,
        )


@dataclass(frozen=True, slots=True)
class _Search:
    """N utterances.

    Attributes:
        names: int64 (N,), the number of each utterance in the batch.
        begins: int64 (N,), the row of its first frame.
        lengths: int64 (N,), its frames.
        limits: int64 (N,), of labels.
        ahead: Hypotheses at this frame, at the next, and so on as far as a symbol leads.
    """

    names: Tensor
    begins: Tensor
    lengths: Tensor
    limits: Tensor
    ahead: tuple[_Hypotheses, ...]

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
        wide = torch.float64 if predicted.dtype == torch.float64 else torch.float32
        nothing = torch.full(shape, _NONE, dtype=wide, device=number.device)
        counts = number.new_zeros(shape)
        first = _Hypotheses(
            scores=nothing.index_fill(1, number.new_zeros(1), 0),
            counts=counts,
            labels=number.new_empty(*shape, 0),
            is_new=counts.bool(),
            predicted=predicted.unflatten(0, shape),
            state=tuple(part.unflatten(0, shape) for part in state),
        )
        reach = max(head.config.durations or (0,))
        return cls(
            names=number,
            begins=bounds[number],
            lengths=bounds[number + 1] - bounds[number],
            limits=torch.tensor([limits[name] for name in names], device=number.device),
            ahead=(first, *[replace(first, scores=nothing)] * reach),
        )


def _recorded(search: _Search, passed: int, found: list[list[int]]) -> _Search:
    """Take out utterances that are at their end: all that has come there is complete."""
    at_end = search.lengths == passed
    index = at_end.nonzero()[:, 0]
    if not len(index):
        return search
    complete = search.ahead[0].keep(index)
    winner = complete.scores.argmax(1)
    transcripts = complete.labels[torch.arange(len(index), device=index.device), winner].tolist()
    for name, labels in zip(search.names[index].tolist(), transcripts, strict=True):
        found[name] = [label for label in labels if label >= 0]
    going = (~at_end).nonzero()[:, 0]
    return _Search(
        search.names[going],
        search.begins[going],
        search.lengths[going],
        search.limits[going],
        tuple(one.keep(going) for one in search.ahead),
    )


def _advance(head: Transducer, frames: Tensor, search: _Search, passed: int) -> _Search:
    """Extend the hypotheses at a frame by all symbols and durations, until all have gone on."""
    now, *later = search.ahead
    durations = head.config.durations or ()
    beam = now.scores.shape[1]
    frame, left = frames[search.begins + passed][:, None], (search.lengths - passed)[:, None]
    while (now.scores > _NONE).any():
        now = _read(head, now)
        logits = head.logits(frame, now.predicted).to(now.scores.dtype)
        symbols = logits[..., : head.blank_id + 1].log_softmax(-1)
        lasting = logits[..., head.blank_id + 1 :].log_softmax(-1)
        said = now.scores[..., None] + symbols
        full = now.counts >= search.limits[:, None]
        label, blank = said[..., :-1].masked_fill(full[..., None], _NONE), said[..., -1]
        for number, frames_on in enumerate(durations):
            if frames_on:
                score = lasting[..., number]
                blanks = (blank + score).masked_fill(frames_on > left, _NONE)
                # Not to the end: a blank must come last.
                past = (frames_on >= left)[..., None]
                labels = (label + score[..., None]).masked_fill(past, _NONE)
                there = later[frames_on - 1]
                later[frames_on - 1] = _extended(there, now, blanks, labels)
        scores, chosen = (label + lasting[..., :1]).flatten(1).topk(beam)
        # What follows cannot become likelier.
        bar = torch.cat([one.scores for one in later], 1).topk(beam).values[:, -1:]
        scores = scores.masked_fill(scores <= bar, _NONE)
        place, new = chosen // label.shape[-1], chosen % label.shape[-1]
        now = now.pick(place).with_labels(scores, scores > _NONE, new)
    nothing = torch.full_like(now.scores, _NONE)
    empty = replace(now, scores=nothing, counts=torch.zeros_like(now.counts))
    return replace(search, ahead=_alike((*later, empty)))


def _alike(several: Sequence[_Hypotheses]) -> tuple[_Hypotheses, ...]:
    """With room for as many labels as the longest transcript has."""
    longest = max(int(one.counts.max()) for one in several)
    return tuple(
        replace(one, labels=F.pad(one.labels, (0, longest - one.labels.shape[-1]), value=-1))
        for one in several
    )


def _read(head: Transducer, now: _Hypotheses) -> _Hypotheses:
    """Let the predictor read new labels, now that their hypotheses are still in the beam."""
    rows = (now.is_new & (now.scores > _NONE)).flatten().nonzero()[:, 0]
    if not len(rows):
        return now
    newest = now.labels.gather(2, (now.counts - 1).clamp(min=0)[..., None]).flatten()[rows]
    old = tuple(part.flatten(0, 1)[rows] for part in now.state)
    predicted, state = head.step(newest, old)

    def put(part: Tensor, value: Tensor) -> Tensor:
        flat = part.flatten(0, 1).index_copy(0, rows, value.to(part.dtype))
        return flat.unflatten(0, part.shape[:2])

    parts = tuple(put(part, value) for part, value in zip(now.state, state, strict=True))
    is_new = torch.zeros_like(now.is_new)
    return replace(now, predicted=put(now.predicted, predicted), state=parts, is_new=is_new)


def _extended(there: _Hypotheses, now: _Hypotheses, blank: Tensor, label: Tensor) -> _Hypotheses:
    """The best of what there is at a later frame and of what leads to it from this one.

    Args:
        there: What there is.
        now: What is here.
        blank: Scores of these with a blank, (N, K).
        label: Scores of these with each label, (N, K, V).
    """
    there, now = _alike((there, now))
    beam, classes = now.scores.shape[1], label.shape[-1]
    scores = _with_blanks(there, now, blank)
    both = _mapped(lambda *parts: torch.cat(parts, 1), there, now)
    scores, label = _with_labels(replace(both, scores=scores), now, label)
    best, chosen = torch.cat([scores, label.flatten(1)], 1).topk(beam)
    new = chosen - 2 * beam
    is_label = new >= 0
    place = torch.where(is_label, beam + new.div(classes, rounding_mode="floor"), chosen)
    return both.pick(place).with_labels(best, is_label & (best > _NONE), new % classes)


def _with_blanks(there: _Hypotheses, now: _Hypotheses, blank: Tensor) -> Tensor:
    """Scores of what there is and of ``blank``, (N, 2 K), those of one transcript in one place."""
    # (N, now, there)
    same = (now.labels[:, :, None] == there.labels[:, None]).all(-1)
    same &= (there.scores > _NONE)[:, None] & (now.scores > _NONE)[..., None]
    moved = blank[..., None].masked_fill(~same, _NONE)
    scores = torch.cat([there.scores[:, None], moved], 1).logsumexp(1)
    return torch.cat([scores, blank.masked_fill(same.any(2), _NONE)], 1)


def _with_labels(both: _Hypotheses, now: _Hypotheses, label: Tensor) -> tuple[Tensor, Tensor]:
    """Move what leads to a transcript that there is from the labels' scores to its own.

    Args:
        both: What there is, and hypotheses with a blank, 2 K of each utterance.
        now: What is here.
        label: (N, K, V).

    Returns:
        Scores of both, (N, 2 K), and of the labels that are left, (N, K, V).
    """
    if not both.labels.shape[-1]:
        return both.scores, label
    before_last = (both.counts - 1).clamp(min=0)[..., None]
    last = both.labels.gather(2, before_last)[..., 0]
    shortened = both.labels.scatter(2, before_last, -1)
    # (N, now, both)
    same = (now.labels[:, :, None] == shortened[:, None]).all(-1)
    same &= now.counts[:, :, None] + 1 == both.counts[:, None]
    same &= (both.scores > _NONE)[:, None] & (now.scores > _NONE)[..., None]
    index = last.clamp(min=0)[:, None].expand(same.shape)
    moved = label.gather(2, index).masked_fill(~same, _NONE)
    scores = torch.cat([both.scores[:, None], moved], 1).logsumexp(1)
    kept = torch.where(same, _NONE, torch.inf).to(label.dtype)
    return scores, label.scatter_reduce(2, index, kept, "amin")


def _mapped(change: Callable[..., Tensor], *several: _Hypotheses) -> _Hypotheses:
    """Hypotheses of which every part is made from those of others."""
    names = [field.name for field in fields(_Hypotheses) if field.name != "state"]
    parts = {name: change(*(getattr(one, name) for one in several)) for name in names}
    state = tuple(change(*tensors) for tensors in zip(*(one.state for one in several), strict=True))
    return _Hypotheses(**parts, state=state)
