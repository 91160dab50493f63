"""Beam search of a transducer (RNN-T), over a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from effasr.decoding.nbest.hypothesis import Hypothesis, NBest
from effasr.decoding.transducer_hypotheses import (
    NO_SCORE,
    Hypotheses,
    Utterances,
    likelier_frames,
    merge_equal,
    without_frames,
)
from effasr.model.transducer import Transducer
from effasr_kernels import PackedSequence


def transducer_beam(
    head: Transducer,
    encoded: PackedSequence,
    beam: int,
    limits: Sequence[int],
    nbest: int = 1,
    *,
    with_frames: bool = False,
) -> list[list[Hypothesis]]:
    """Find the likeliest transcripts of each sequence of encoder output.

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
        nbest: Hypotheses of each sequence to return, from 1 to ``beam``.
        with_frames: Whether hypotheses have the frames of their labels, which takes time.

    Returns:
        The hypotheses of each sequence, the best first: for an empty one the empty transcript.

    References:
        Saon et al., 2020, https://ieeexplore.ieee.org/document/9053040 (alignment-length
        synchronous decoding).
    """
    frames = head.encoder_projection(encoded.values)
    found = without_frames(encoded, len(limits), nbest)
    utterances = Utterances.of(encoded, limits)
    hypotheses = Hypotheses.begin(head, len(utterances), beam, with_frames=with_frames)
    search = Search(
        utterances,
        best=hypotheses.scores.new_full((len(utterances), nbest), NO_SCORE),
        at=utterances.begins[:, None].expand(-1, beam),
        hypotheses=hypotheses,
    )
    while len(search.utterances):
        search = recorded(advance(head, frames, search), found)
    return found.lists()


@dataclass(frozen=True, slots=True)
class Search:
    """N utterances with K hypotheses each.

    Attributes:
        utterances: N of them.
        best: (N, nbest), scores of the likeliest complete hypotheses so far, the best first.
        at: int64 (N, K), the row of the next frame of each hypothesis.
        hypotheses: The beam.
    """

    utterances: Utterances
    best: Tensor
    at: Tensor
    hypotheses: Hypotheses


def advance(head: Transducer, frames: Tensor, search: Search) -> Search:
    """Extend every hypothesis by the blank and by each label, and keep the K best."""
    before = search.hypotheses
    logits = head.logits(frames[search.at], before.predicted)
    steps = logits.to(before.scores.dtype).log_softmax(-1)
    label, blank = before.scores[..., None] + steps[..., :-1], before.scores + steps[..., -1]
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
        said = likelier_frames(picked, merged, parent, symbol == head.blank_id)
        picked = replace(picked, frames=said)
    after = picked.with_labels(scores, is_label, symbol, now.gather(1, parent))
    return replace(
        search,
        at=search.at.gather(1, parent) + (symbol == head.blank_id),
        hypotheses=after.read(head),
    )


def recorded(search: Search, found: NBest) -> Search:
    """Record complete hypotheses, and drop utterances that no other hypothesis can improve."""
    hypotheses = search.hypotheses
    complete = search.at == search.utterances.ends[:, None]
    ended = replace(hypotheses, scores=hypotheses.scores.masked_fill(~complete, NO_SCORE))
    ended.record(search.utterances, search.best[:, -1:], found)
    best = torch.cat([search.best, ended.scores], 1).topk(found.size).values
    left = hypotheses.scores.masked_fill(complete, NO_SCORE)
    # The sum of the remaining scores bounds the score of any transcript still reachable.
    going = (left.logsumexp(1) > best[:, -1]).nonzero()[:, 0]
    at = torch.minimum(search.at, (search.utterances.ends - 1)[:, None])
    return Search(
        search.utterances.keep(going),
        best[going],
        at[going],
        replace(hypotheses, scores=left).keep(going),
    )
