"""What all corpora of a run have in common: the epochs that their mixture draws."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from effasr.data.batch import StaticShape
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr.data.filters.config import TooManyDropped
from effasr.data.filters.rules import Dropped
from effasr.data.mixture_summary import Mixture, MixtureSummary
from effasr.data.prompt import Prompt
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths
from effasr.data.sampling.population import Population


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BaseCorpus:
    """Base of the corpora that the loader and the trainer read.

    The data are flat arrays, which forked workers share; objects would be copied when their
    reference counts change.
    """

    lengths: UtteranceLengths  # of each member, which the planner packs
    shape: StaticShape  # of every batch
    dropped: tuple[Dropped, ...]  # members of the manifests that were left out
    samples: np.ndarray  # int (n,), durations of speech at `SAMPLE_RATE`
    sources: np.ndarray  # uint16 (n,)
    mixture: Mixture | None = None  # None without shares
    fingerprint: str  # of lengths, texts, sources and order, which a resumed run compares
    seconds: float = 0.0  # of all speech
    experts: np.ndarray | None = None  # int64 (n,), see `Batch.expert`
    # The most frequent one, which model cards and defaults use; unused of conversations
    prompt: Prompt = field(default_factory=Prompt)
    eos_id: int
    pad_id: int
    text: Any = None  # a `TextCorpus` for text-only micro-batches beside these, or None

    def __len__(self) -> int:
        return len(self.lengths)

    def duration(self, index: int) -> float:
        """Return seconds of speech, at the speed of an utterance."""
        return int(self.samples[index]) / SAMPLE_RATE

    @property
    def amounts(self) -> np.ndarray:
        """What shares are measured by, int32 (n,)."""
        raise NotImplementedError

    @property
    def durations(self) -> tuple[float, float] | None:
        """Seconds of the median and of the longest utterance; None without audio."""
        return None

    def silence(self, index: int) -> int:
        """Return how many samples of silence a member gets at its ends."""
        return 0

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
        """Return the shares that a plan, and one of ``text``, give the sources."""
        if self.mixture is None:
            return []
        counts = self.mixture.count(self.sources, self.amounts, plan.indices)
        summaries = [self.mixture.summary(counts)]
        if (text := self.text) is not None and text_plan is not None:
            counts = text.shares.count(text.sources, text.amounts, text_plan.indices)
            summaries.append(text.shares.summary(counts))
        return summaries

    @property
    def speakers(self) -> int:
        return 0

    @property
    def monotonic(self) -> np.ndarray:
        """Whether a text follows the speech in order, bool (n,): False where it is not known."""
        return np.zeros(len(self), dtype=bool)

    def transcripts(self, limit: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield frames and tokens of at most so many transcripts for CTC."""
        return iter(())


def nothing_left(
    paths: Sequence[str | Path], problem: str, dropped: Sequence[Dropped]
) -> ValueError:
    first = f"; the first: {dropped[0].details}" if dropped else ""
    names = ", ".join(map(str, paths)) or "no manifest"
    message = f"{names}: {problem} ({len(dropped)} dropped{first})."
    return TooManyDropped(message, dropped) if dropped else ValueError(message)


def digest(arrays: Iterable[np.ndarray]) -> str:
    """Digest what determines plans and targets; paths are left out, so that data may move."""
    hashed = hashlib.sha256()
    for values in arrays:
        hashed.update(np.ascontiguousarray(values).data)
    return hashed.hexdigest()
