"""Draws the utterances of an epoch of mixed sources."""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from effasr.checks import check
from effasr.data.batch import StaticShape
from effasr.data.sampling.ends import exchanged
from effasr.data.sampling.plan import EpochPlan, Planner, UtteranceLengths, shuffled

Population = Callable[[int], np.ndarray]
"""Maps an epoch to its utterances, int32 (p,), with repetitions."""


def population(
    sources: np.ndarray,  # int (n,), the source of each utterance
    amounts: np.ndarray,  # int (n,), size of each utterance, such as its samples; at least 1
    quotas: Sequence[int],  # of each source in an epoch, in the unit of ``amounts``
    *,
    seed: int,
    epoch: int,
) -> np.ndarray:
    """Draw the utterances of an epoch so that every source contributes its quota: int32 (p,).

    A pure function. Each source is an endless sequence of its utterances, shuffled anew for each
    pass. An epoch takes the next ``quotas[s]`` of it; an utterance belongs to the epoch in which it
    begins. As all passes are equally long, any epoch is computed directly. Quotas are met to within
    one utterance, and utterances of a source are drawn equally often to within one or two.
    The planner shuffles them.
    """
    result = sequences(sources, amounts, quotas, seed=seed, epoch=epoch)
    parts = [item.stretch(q * epoch, q * (epoch + 1)) for q, item in result]
    drawn = np.concatenate([*parts, np.arange(0, dtype=np.int32)])
    if not len(drawn) and result:
        # Where epochs are shorter than utterances, one in which none begins has the last one again.
        quota, item = result[0]
        _, begun = item.begun(quota * epoch)
        return begun[-1:]
    return drawn


def sequences(
    sources: np.ndarray, amounts: np.ndarray, quotas: Sequence[int], *, seed: int, epoch: int
) -> "list[tuple[int, SourceSequence]]":
    """Return the quota and the sequence of each source that has a quota; see `population`."""
    check(epoch >= 0, "epoch", "be at least 0", epoch)
    if amounts.size and amounts.min() < 1:
        worst = int(amounts.argmin())
        raise ValueError(f"`amounts[{worst}]` must be at least 1, but is {amounts[worst]}.")
    by_source = np.argsort(sources, kind="stable").astype(np.int32)
    bounds = np.searchsorted(sources[by_source], np.arange(len(quotas) + 1))
    result = []
    for source, quota in enumerate(quotas):
        members = by_source[bounds[source] : bounds[source + 1]]
        if not quota:
            continue
        if not members.size:
            raise ValueError(f"`quotas[{source}]` must be 0 for a source without utterances.")
        digest = hashlib.blake2b(struct.pack("<qq", seed, source), digest_size=8, person=b"source")
        key = int.from_bytes(digest.digest(), "little")
        result.append((quota, SourceSequence(members, amounts[members], key)))
    return result


class SourceSequence:
    """A source as an endless sequence of its utterances, shuffled anew for each pass."""

    def __init__(self, members: np.ndarray, amounts: np.ndarray, seed: int) -> None:
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
    """Plans the population of each epoch with another planner."""

    make: Callable[[UtteranceLengths], Planner]  # Makes the planner for utterances of given lengths
    lengths: UtteranceLengths  # Lengths of all utterances
    population: Population  # Maps an epoch to its utterances
    # None: each epoch has limits of its own, those of the utterances that it draws
    buckets: None = None

    @property
    def shape(self) -> StaticShape | None:
        """The static shape of every batch; None if each batch has its own."""
        return self.make(self.lengths).shape

    def plan(self, epoch: int) -> EpochPlan:
        """Plan an epoch: each member of its population is in one micro-batch or deferred."""
        chosen = self.population(epoch)
        plan = self.make(self.lengths.take(chosen)).plan(epoch)
        return replace(plan, indices=chosen[plan.indices], deferred=np.sort(chosen[plan.deferred]))


# Draws epochs of mixed sources that all have the same frames and the same tokens.
#
# An epoch meets the quota of each source in one quantity. The other varies with what is drawn, by
# as much as a step. Here utterances near the border between two epochs change sides, until the
# utterances before the border have the frames and tokens that they have on average.

_NEAR = 256
"""Utterances on each side of a border that may change sides."""

_NONE = np.arange(0, dtype=np.int32)


def even_population(
    lengths: UtteranceLengths,
    sources: np.ndarray,  # int (n,), the source of each utterance
    quotas: Sequence[int],  # tokens that each source contributes to an epoch on average
    *,
    seed: int,
    epoch: int,
) -> np.ndarray:
    """Draw the utterances of an epoch with equal frames and tokens in every epoch: int32 (p,).

    A pure function. What it draws over all epochs is what `population` draws from tokens; only
    utterances near the borders between epochs belong to the epoch before or after instead. A border
    has to make up for all that was drawn before it, so shares of sources do not drift. The
    planner shuffles the result.
    """
    result = sequences(sources, lengths.tokens, quotas, seed=seed, epoch=epoch)
    if not result:
        return _NONE
    _, after = _border(lengths, result, epoch)
    before, _ = _border(lengths, result, epoch + 1)
    return np.concatenate([after, before]).astype(np.int32)


def mean_epoch(
    lengths: UtteranceLengths, sources: np.ndarray, quotas: Sequence[int]
) -> tuple[int, int]:
    """Return the frames and tokens of an epoch, on average."""
    count = len(quotas)
    # Sums of integers below 2**53 are exact in float64, whatever their order.
    frames = np.bincount(sources, weights=lengths.frames, minlength=count).astype(np.int64).tolist()
    tokens = np.bincount(sources, weights=lengths.tokens, minlength=count).astype(np.int64).tolist()
    drawn = [quota * f // max(1, t) for quota, f, t in zip(quotas, frames, tokens, strict=True)]
    return sum(drawn), sum(quotas)


def _border(
    lengths: UtteranceLengths, found: Sequence[tuple[int, SourceSequence]], number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the second half of the epoch before border ``number``, and the first half after it.

    Utterances change sides within these halves alone, so neighbouring borders do not interfere.
    """
    values = [lengths.frames, lengths.tokens]
    near = max(1, _NEAR // len(found))
    target, drawn, unit = [0, 0], [0, 0], [0, 0]
    kept_before, kept_after, chosen, waiting = [], [], [], []
    for quota, sequence in found:
        border = quota * number
        before = sequence.stretch(border - quota + quota // 2, border) if number else _NONE
        after = sequence.stretch(border, border + quota // 2)
        cut = max(0, len(before) - near)
        kept_before.append(before[:cut])
        chosen.append(before[cut:])
        waiting.append(after[:near])
        kept_after.append(after[near:])
        passes, begun = sequence.begun(border)
        for kind, value in enumerate(values):
            whole = int(value[sequence.members].sum(dtype=np.int64))
            target[kind] += border * whole // sequence.total
            unit[kind] += quota * whole // sequence.total
            drawn[kind] += passes * whole + int(value[begun].sum(dtype=np.int64))
    ones, other_items = np.concatenate(chosen), np.concatenate(waiting)
    if number:
        missing = [t - d for t, d in zip(target, drawn, strict=True)]
        ones, other_items = exchanged(values, missing, unit, ones, other_items)
    return np.concatenate([*kept_before, ones]), np.concatenate([*kept_after, other_items])
