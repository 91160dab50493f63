"""Hypotheses of a search, and the best of them for each utterance."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ScoreParts:
    """Log-probabilities of a transcript in nats, of which its score is a weighted sum.

    Attributes:
        own: By the attention decoder, end included; of CTC and transducers, what their search has
            summed.
        ctc: By the CTC head beside an attention decoder, over all alignments; None without one.
        lm: By the language model over tokens, end included; None without one.
        symbols: Tokens and the end, by which the length penalty divides.
    """

    own: float
    ctc: float | None
    lm: float | None
    symbols: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete transcript that a search has found.

    Attributes:
        tokens: Token ids without prompt and end token.
        score: Log-probability in nats. With CTC scores or a language model, their weighted sum. Of
            CTC and transducers, the sum over the alignments that the beam has kept.
        rank: What the search orders hypotheses by: the score, after penalties if there are any.
        parts: What the score is the sum of; None if not requested.
        frames: Encoder frame at which the search says each token, on the likeliest path that the
            beam has kept; none of a search that does not know them, or is not asked for them.
    """

    tokens: tuple[int, ...]
    score: float
    rank: float
    parts: ScoreParts | None = None
    frames: tuple[int, ...] = field(default=(), compare=False)


class NBest:
    """The best hypotheses so far of each utterance of a batch.

    Args:
        utterances: Number of utterances.
        size: N, hypotheses of each that are kept, at least 1.
    """

    def __init__(self, utterances: int, size: int = 1) -> None:
        self.size = size
        self._lists: list[list[Hypothesis]] = [[] for _ in range(utterances)]

    def add(self, name: int, hypothesis: Hypothesis) -> None:
        """Add a hypothesis of an utterance; of equal ranks the earlier one goes first.

        One with a rank of -inf is no transcript, and is left out.
        """
        if hypothesis.rank == -math.inf:
            return
        own = self._lists[name]
        insort(own, hypothesis, key=lambda one: -one.rank)
        del own[self.size :]

    def add_rows(
        self,
        names: Sequence[int],
        labels: Tensor,
        scores: Tensor,
        ranks: Tensor | None = None,
        frames: Tensor | None = None,
    ) -> None:
        """Add hypotheses from tensors.

        Args:
            names: The utterance of each row.
            labels: int64 (M, longest); negative ids are no tokens.
            scores: (M,).
            ranks: (M,); the scores by default.
            frames: int64 (M, longest), of the labels; None if they are not known.
        """
        ranks = scores if ranks is None else ranks
        times = [()] * len(labels) if frames is None else frames.tolist()
        rows = zip(names, labels.tolist(), scores.tolist(), ranks.tolist(), times, strict=True)
        for name, row, score, rank, said in rows:
            tokens = tuple(label for label in row if label >= 0)
            self.add(name, Hypothesis(tokens, score, rank, frames=tuple(said[: len(tokens)])))

    def lists(self) -> list[list[Hypothesis]]:
        """Return the hypotheses of each utterance, the best first."""
        return self._lists
