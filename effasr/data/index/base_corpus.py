"""What all corpora of a run have in common: the epochs that their mixture draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from effasr.data.batch import StaticShape
from effasr.data.mixture_summary import Mixture, MixtureSummary
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths
from effasr.data.sampling.population import Population

if TYPE_CHECKING:
    from effasr.data.index.text_corpus import TextCorpus


class BaseCorpus:
    """Base of the corpora that the loader and the trainer read.

    Attributes:
        lengths: Frames and tokens of each member, which the planner packs.
        shape: The static shape of every batch.
        sources: uint16 (n,), the source of each member.
        amounts: int32 (n,), what shares are measured by.
        mixture: Requested share of each source; None without shares.
        text: Text pairs for text-only micro-batches beside these; None without any.
    """

    __slots__ = ()

    lengths: UtteranceLengths
    shape: StaticShape
    sources: np.ndarray
    amounts: np.ndarray
    mixture: Mixture | None
    text: TextCorpus | None

    def __len__(self) -> int:
        return len(self.lengths)

    def populations(self, seed: int) -> Population | None:
        """Return the function that draws an epoch's members; None if an epoch has each once."""
        if self.mixture is None:
            return None
        return self.mixture.populations(self.sources, self.amounts, seed=seed)

    def steps(self, micro_batches: int) -> int:
        """Return the approximate global steps of an epoch, from its frames and tokens."""
        members = slice(None) if (draw := self.populations(seed=0)) is None else draw(0)
        frames = int(self.lengths.frames[members].sum(dtype=np.int64)) / self.shape.frame_budget
        tokens = int(self.lengths.tokens[members].sum(dtype=np.int64)) / self.shape.token_budget
        return max(1, round(max(frames, tokens) / micro_batches))

    def summaries(
        self, plan: EpochPlan, text_plan: EpochPlan | None = None
    ) -> list[MixtureSummary]:
        """Return the shares that a plan, and one of ``text``, give the sources.

        The list is empty without a mixture.
        """
        if self.mixture is None:
            return []
        drawn = self.mixture.count(self.sources, self.amounts, plan.indices)
        summaries = [self.mixture.summary(drawn)]
        if (text := self.text) is not None and text_plan is not None:
            drawn = text.mixture.count(text.sources, text.lengths.frames, text_plan.indices)
            summaries.append(text.mixture.summary(drawn))
        return summaries

    @property
    def speakers(self) -> int:
        """Number of named speakers: 0 where none are named."""
        return 0

    @property
    def monotonic(self) -> np.ndarray:
        """Whether a text follows the speech in order, bool (n,): False where it is not known."""
        return np.zeros(len(self), dtype=bool)

    def transcripts(self, limit: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield at most so many transcripts for CTC: none where no text follows the speech."""
        return iter(())
