"""Draws the utterances of an epoch of mixed sources."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from effasr.data.batch import StaticShape
from effasr.data.sampling.plan import EpochPlan, Planner, UtteranceLengths
from effasr.data.sampling.shuffle import shuffled

Population = Callable[[int], np.ndarray]
"""Maps an epoch to its utterances, int32 (p,), with repetitions."""


def population(
    sources: np.ndarray,
    amounts: np.ndarray,
    quotas: Sequence[int],
    *,
    seed: int,
    epoch: int,
) -> np.ndarray:
    """Draw the utterances of an epoch so that every source contributes its quota.

    A pure function. Each source is an endless sequence of its utterances, shuffled anew for each
    pass. An epoch takes the next ``quotas[s]`` of it; an utterance belongs to the epoch in which it
    begins. As all passes are equally long, any epoch is computed directly. Quotas are met to within
    one utterance, and utterances of a source are drawn equally often to within one or two.

    Args:
        sources: int (n,), the source of each utterance.
        amounts: int (n,), size of each utterance, such as its samples; at least 1.
        quotas: Contribution of each source to an epoch, in the unit of ``amounts``.
        seed: Seed of the run.
        epoch: Number of the epoch.

    Returns:
        int32 (p,), grouped by source; the planner shuffles them.

    Raises:
        ValueError: A source with a quota has no utterance, or an amount is less than 1.
    """
    found = sequences(sources, amounts, quotas, seed=seed, epoch=epoch)
    parts = [one.stretch(q * epoch, q * (epoch + 1)) for q, one in found]
    return np.concatenate([*parts, np.arange(0, dtype=np.int32)])


def sequences(
    sources: np.ndarray, amounts: np.ndarray, quotas: Sequence[int], *, seed: int, epoch: int
) -> list[tuple[int, SourceSequence]]:
    """Return the quota and the sequence of each source that has a quota; see `population`."""
    if epoch < 0:
        raise ValueError(f"`epoch` must be at least 0, but is {epoch}.")
    if amounts.size and amounts.min() < 1:
        worst = int(amounts.argmin())
        raise ValueError(f"`amounts[{worst}]` must be at least 1, but is {amounts[worst]}.")
    by_source = np.argsort(sources, kind="stable").astype(np.int32)
    bounds = np.searchsorted(sources[by_source], np.arange(len(quotas) + 1))
    found = []
    for source, quota in enumerate(quotas):
        members = by_source[bounds[source] : bounds[source + 1]]
        if not quota:
            continue
        if not members.size:
            raise ValueError(f"`quotas[{source}]` must be 0 for a source without utterances.")
        key = _source_seed(seed, source)
        found.append((quota, SourceSequence(members, amounts[members], key)))
    return found


class SourceSequence:
    """A source as an endless sequence of its utterances, shuffled anew for each pass."""

    def __init__(self, members: np.ndarray, amounts: np.ndarray, seed: int) -> None:
        """Prepare the sequence.

        Args:
            members: int32 (n,), the utterances of the source.
            amounts: int (n,), the size of each.
            seed: Seed of the orders.
        """
        self.members, self._amounts, self._seed = members, amounts, seed
        self.total = int(amounts.sum(dtype=np.int64))
        self._passes: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def stretch(self, begin: int, end: int) -> np.ndarray:
        """Return the utterances that begin at positions in ``[begin, end)``: int32."""
        first, last = begin // self.total, (end - 1) // self.total
        if first >= last:
            return self._of_pass(first, begin, end)
        # Passes in between are complete; their order does not matter, as the planner shuffles.
        between = [self.members] * (last - first - 1)
        head, tail = self._of_pass(first, begin, end), self._of_pass(last, begin, end)
        return np.concatenate([head, *between, tail])

    def begun(self, position: int) -> tuple[int, np.ndarray]:
        """Return the complete passes before a position, and the utterances of the next one."""
        number = position // self.total
        return number, self._of_pass(number, number * self.total, position)

    def _of_pass(self, number: int, begin: int, end: int) -> np.ndarray:
        if number not in self._passes:
            order = shuffled(len(self.members), self._seed, number)
            ordered = self._amounts[order]
            starts = np.cumsum(ordered, dtype=np.int64) - ordered
            self._passes[number] = self.members[order], starts
        members, starts = self._passes[number]
        offset = number * self.total
        low, high = np.searchsorted(starts, [begin - offset, end - offset])
        return members[low:high]


@dataclass(frozen=True, slots=True)
class PopulationPlanner:
    """Plans the population of each epoch with another planner.

    Attributes:
        make: Makes the planner for utterances of given lengths.
        lengths: Lengths of all utterances.
        population: Maps an epoch to its utterances.
        buckets: None: each epoch has limits of its own, those of the utterances that it draws.
    """

    make: Callable[[UtteranceLengths], Planner]
    lengths: UtteranceLengths
    population: Population
    buckets: None = None

    @property
    def shape(self) -> StaticShape | None:
        """The static shape of every batch; None if each batch has its own."""
        return self.make(self.lengths).shape

    def plan(self, epoch: int) -> EpochPlan:
        """Plan an epoch: each member of its population is in one micro-batch or deferred.

        Raises:
            ValueError: ``epoch`` is negative.
        """
        chosen = self.population(epoch)
        lengths = UtteranceLengths(self.lengths.frames[chosen], self.lengths.tokens[chosen])
        plan = self.make(lengths).plan(epoch)
        return replace(plan, indices=chosen[plan.indices], deferred=np.sort(chosen[plan.deferred]))


def _source_seed(seed: int, source: int) -> int:
    digest = hashlib.blake2b(struct.pack("<qq", seed, source), digest_size=8, person=b"source")
    return int.from_bytes(digest.digest(), "little")
