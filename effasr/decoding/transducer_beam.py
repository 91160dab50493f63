"""Beam search of a transducer (RNN-T), over a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from effasr.decoding.transducer_hypotheses import (
    NO_SCORE,
    Hypotheses,
    Utterances,
    merge_equal,
)
from effasr.model.transducer import Transducer
from effasr_kernels import PackedSequence


def transducer_beam(
    head: Transducer, encoded: PackedSequence, beam: int, limits: Sequence[int]
) -> list[list[int]]:
    """Find the likeliest transcript of each sequence of encoder output.

    Step i compares hypotheses with t frames read and u labels, t + u = i. In each step a transcript
    has one hypothesis, whose score is the sum over all paths to it that the beam has kept: paths
    that end with a blank and paths that end with the last label are added. So the search is exact
    with a beam that is wide enough, and greedy without a limit on the labels of a frame with a beam
    of 1.

    Args:
        head: Transducer of the model.
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
    utterances = Utterances.of(encoded, limits)
    hypotheses = Hypotheses.begin(head, len(utterances), beam)
    search = _Search(
        utterances,
        best=torch.full_like(hypotheses.scores[:, 0], NO_SCORE),
        at=utterances.begins[:, None].expand(-1, beam),
        hypotheses=hypotheses,
    )
    while len(search.utterances):
        search = _recorded(_advance(head, frames, search), found)
    return found


@dataclass(frozen=True, slots=True)
class _Search:
    """N utterances with K hypotheses each.

    Attributes:
        utterances: N of them.
        best: (N,), score of the likeliest complete hypothesis so far.
        at: int64 (N, K), the row of the next frame of each hypothesis.
        hypotheses: The beam.
    """

    utterances: Utterances
    best: Tensor
    at: Tensor
    hypotheses: Hypotheses


def _advance(head: Transducer, frames: Tensor, search: _Search) -> _Search:
    """Extend every hypothesis by the blank and by each label, and keep the K best."""
    before = search.hypotheses
    logits = head.logits(frames[search.at], before.predicted)
    steps = logits.to(before.scores.dtype).log_softmax(-1)
    label, blank = before.scores[..., None] + steps[..., :-1], before.scores + steps[..., -1]
    full = before.counts >= search.utterances.limits[:, None]
    label = label.masked_fill(full[..., None], NO_SCORE)
    blank, label = merge_equal(blank, before, label, before)
    pool = torch.cat([label, blank[..., None]], -1)
    scores, chosen = pool.flatten(1).topk(before.scores.shape[1])
    parent, symbol = chosen // pool.shape[-1], chosen % pool.shape[-1]
    is_label = (symbol != head.blank_id) & (scores > NO_SCORE)
    return replace(
        search,
        at=search.at.gather(1, parent) + (symbol == head.blank_id),
        hypotheses=before.pick(parent).with_labels(scores, is_label, symbol).read(head),
    )


def _recorded(search: _Search, found: list[list[int]]) -> _Search:
    """Record complete hypotheses, and drop utterances that no other hypothesis can improve."""
    hypotheses = search.hypotheses
    complete = search.at == search.utterances.ends[:, None]
    ended = replace(hypotheses, scores=hypotheses.scores.masked_fill(~complete, NO_SCORE))
    scores = ended.scores.amax(1)
    better = (scores > search.best).nonzero()[:, 0]
    if len(better):
        names = search.utterances.names[better].tolist()
        for name, labels in zip(names, ended.keep(better).transcripts(), strict=True):
            found[name] = labels
    best = torch.maximum(search.best, scores)
    left = hypotheses.scores.masked_fill(complete, NO_SCORE)
    # The sum of the remaining scores bounds the score of any transcript still reachable.
    going = (left.logsumexp(1) > best).nonzero()[:, 0]
    at = torch.minimum(search.at, (search.utterances.ends - 1)[:, None])
    return _Search(
        search.utterances.keep(going),
        best[going],
        at[going],
        replace(hypotheses, scores=left).keep(going),
    )
