"""Hypotheses of a search, and the best of them for each utterance."""

import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

from torch import Tensor

T = TypeVar("T")


class Batched:
    """Base of dataclasses whose tensors, and those of what they hold, have rows of utterances."""

    def keep(self, index: Tensor | slice) -> Self:
        return mapped(lambda rows: rows[index], self)


def mapped(change: Callable[..., Tensor], *several: T) -> T:
    """Change all tensors of a dataclass, or combine those of several; None stays."""
    first: Any = several[0]
    result: Any = first
    if isinstance(first, Tensor):
        result = change(*several)
    elif isinstance(first, tuple):
        result = tuple(mapped(change, *parts) for parts in zip(*several, strict=True))
    elif first is not None:
        names = [field.name for field in fields(first)]
        parts = {name: mapped(change, *(getattr(item, name) for item in several)) for name in names}
        result = replace(first, **parts)
    return result


@dataclass(frozen=True, slots=True)
class ScoreParts:
    """Log-probabilities of a transcript in nats, of which its score is a weighted sum."""

    # By the attention decoder, end included; of CTC and transducers, the sum of their search.
    model: float
    ctc: float | None  # by the CTC head beside an attention decoder, over all alignments
    lm: float | None  # by the language model over tokens, end included
    symbols: int  # tokens and the end, by which the length penalty divides


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete transcript."""

    tokens: tuple[int, ...]  # without prompt and end token
    # Log-probability in nats; with CTC scores or a language model, their weighted sum. Of CTC and
    # transducers, the sum over the alignments that the beam has kept.
    score: float
    rank: float  # orders hypotheses: the score, after penalties if there are any
    parts: ScoreParts | None = None
    # Encoder frame of each token on the likeliest path of the beam; empty if not followed.
    frames: tuple[int, ...] = field(default=(), compare=False)


class NBest:
    """The ``size`` best hypotheses so far of each utterance of a batch."""

    def __init__(self, utterances: int, size: int = 1) -> None:
        self.size = size
        self.lists: list[list[Hypothesis]] = [[] for _ in range(utterances)]

    def add(self, utterance: int, hypothesis: Hypothesis) -> None:
        """Add a hypothesis; among equal ranks the earlier one goes first."""
        if hypothesis.rank == -math.inf:  # an empty place of the beam
            return
        hypotheses = self.lists[utterance]
        insort(hypotheses, hypothesis, key=lambda other: -other.rank)
        del hypotheses[self.size :]

    def add_rows(
        self,
        utterances: Sequence[int],
        labels: Tensor,  # int64 (M, longest); negative ids are no tokens
        scores: Tensor,  # (M,)
        ranks: Tensor | None = None,  # (M,); the scores by default
        frames: Tensor | None = None,  # int64 (M, longest), of the labels
    ) -> None:
        ranks = scores if ranks is None else ranks
        times = [()] * len(labels) if frames is None else frames.tolist()
        rows = zip(utterances, labels.tolist(), scores.tolist(), ranks.tolist(), times, strict=True)
        for utterance, row, score, rank, frame_row in rows:
            tokens = tuple(label for label in row if label >= 0)
            frames_of_tokens = tuple(frame_row[: len(tokens)])
            self.add(utterance, Hypothesis(tokens, score, rank, frames=frames_of_tokens))
