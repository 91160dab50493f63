"""Carries the utterances that do not fill a whole step over to the next epoch.

After epoch e, (e + 1) passes over the corpus have been due, and as many steps as these fill have
been made. What is left, less than a step, is a random part D(e) of the corpus, of known size. So
epoch e has the corpus, without D(e), with D(e - 1): it fills whole steps, every utterance is
planned once in each pass, and any epoch is known without those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from effasr.data.batch import StaticShape
from effasr.data.sampling.filling import Utterances, budgets, fill, scarcest, values_of
from effasr.data.sampling.shuffle import hashes, shuffled

_SHARES = (9990, 9980, 9970, 9950, 9900, 9800, 9700, 9500, 9200, 9000, 8500, 8000, 7000, 6000)
_SHARES += (5000, 4000, 3000, 2000, 1000)
"""Shares of a budget that may be filled on average, in 1/10,000."""
_RANDOM = 4
"""So many of them are tried without a reserve, which makes steps unequal."""
_TRIED = 128
"""Micro-batches with which that is tried."""
_TRIALS = 8
"""Trials at most; so many where they are small, and differ."""
_WINDOW = 256
"""Utterances at the border of what is carried over that may still change sides."""
_ADJUSTMENTS = 64
"""Of them, at most so many do."""
_TRIAL = 0x7472_6961_6C
_CARRY = 0x6361_7272_79
"""Added to seeds, for orders that have nothing to do with that of an epoch."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a micro-batch can be expected to hold.

    Attributes:
        scarce: What runs out first: 0 for frames, 1 for tokens, 2 for utterances.
        amount: How much of it a micro-batch holds.
    """

    scarce: int
    amount: int


def capacity(utterances: Utterances, shape: StaticShape) -> Capacity:
    """Find out how full micro-batches of these utterances can be, by filling some."""
    totals, limits = utterances.totals(), budgets(shape)
    scarce = scarcest(totals, limits)

    def holds(share: int) -> int:
        return max(1, limits[scarce] * share // 10_000)

    # Twice what is needed, to choose those that have frames and tokens in the same proportion.
    count = -(-2 * _TRIED * limits[scarce] * len(utterances) // totals[scarce])
    sample = _sample(utterances, count)

    def reached(share: int, ways: Sequence[bool]) -> bool:
        return _reached(sample, totals, scarce, holds(share), shape, ways)

    for share in _SHARES[:_RANDOM]:
        if reached(share, (False,)):
            return Capacity(scarce, holds(share))
    # The largest share that is reached, by halving what is in question.
    low, high = 0, len(_SHARES) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(_SHARES[middle], (False, True)) else (middle + 1, high)
    # What was reached with some effort may not be reached each time.
    return Capacity(scarce, holds(_SHARES[min(low + 1, len(_SHARES) - 1)]))


def _reached(
    sample: Utterances,
    totals: tuple[int, int, int],
    scarce: int,
    amount: int,
    shape: StaticShape,
    ways: Sequence[bool],
) -> bool:
    """Whether micro-batches can be filled to this amount on average, in every trial.

    Ways are without and with a reserve; one of them must do.
    """
    micro_batches = min(_TRIED, sample.totals()[scarce] // amount)
    if not micro_batches:
        return True
    for trial in range(max(1, min(_TRIALS, _TRIED // micro_batches))):
        part = matched(sample, totals, scarce, micro_batches * amount, _TRIAL, trial)
        part = part[shuffled(len(part), _TRIAL, trial)]
        some = Utterances(sample.frames[part], sample.tokens[part])
        if not any(fill(some, shape, micro_batches, reserve=reserve) for reserve in ways):
            return False
    return True


class Ends:
    """The ends of all epochs of a run."""

    def __init__(
        self, utterances: Utterances, holds: Capacity, micro_batches: int, seed: int
    ) -> None:
        """Prepare; at least a step must be full in each pass."""
        self._utterances, self._seed = utterances, seed
        self._scarce = holds.scarce
        self._totals = utterances.totals()
        self._step = holds.amount * micro_batches

    @property
    def fills_a_step(self) -> bool:
        """Whether a pass fills a step; else nothing can be carried over."""
        return self._totals[self._scarce] >= self._step

    @property
    def least_steps(self) -> int:
        """Steps that a pass needs, the last one partly filled."""
        return max(1, -(-self._totals[self._scarce] // self._step))

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch, at least 1."""
        total = self._totals[self._scarce]
        return (epoch + 1) * total // self._step - epoch * total // self._step

    def carried(self, epoch: int) -> np.ndarray:
        """D(e), the utterances that an epoch leaves to the next: int64, ascending."""
        total = self._totals[self._scarce]
        amount = (epoch + 1) * total % self._step
        if epoch < 0 or not amount:
            return np.arange(0)
        seed = self._seed + _CARRY
        return matched(self._utterances, self._totals, self._scarce, amount, seed, epoch)


def matched(
    utterances: Utterances,
    totals: tuple[int, int, int],
    scarce: int,
    amount: int,
    seed: int,
    number: int,
) -> np.ndarray:
    """A random part of the utterances, with frames and tokens in a given proportion.

    Args:
        utterances: At least one.
        totals: Frames, tokens and utterances in that proportion.
        scarce: What is measured; see `Capacity`.
        amount: How much of it the part has, to within an utterance.
        seed: Of the random order from which it is taken.
        number: Likewise.

    Returns:
        int64, places in ascending order.
    """
    order = _first(utterances, scarce, amount, seed, number)
    ends = np.cumsum(values_of(utterances, scarce)[order], dtype=np.int64)
    count = int(np.searchsorted(ends, amount, side="right"))
    target = [total * amount // totals[scarce] for total in totals]
    part = _adjusted(utterances, order[:count], order[count : count + _WINDOW], target, scarce)
    return np.sort(part)


def _first(utterances: Utterances, scarce: int, amount: int, seed: int, number: int) -> np.ndarray:
    """The first utterances of a random order, with surely more than the amount."""
    count, values = len(utterances), hashes(len(utterances), seed, number)
    # To sort them all would take long where they are millions.
    share = amount / utterances.totals()[scarce] * 1.25 + 4 * _WINDOW / count
    if share < 1:
        some = np.flatnonzero(values < np.uint64(int(share * 2**64)))
        if int(values_of(utterances, scarce)[some].sum(dtype=np.int64)) > amount:
            return some[np.argsort(values[some], kind="stable")]
    return np.argsort(values, kind="stable")


def _adjusted(
    utterances: Utterances,
    chosen: np.ndarray,
    waiting: np.ndarray,
    target: list[int],
    scarce: int,
) -> np.ndarray:
    """Exchange some of the chosen with waiting ones, to meet the target of each quantity."""
    kinds = [0, 1] if scarce < 2 else [0, 1, 2]
    # Number -1 stands for nothing.
    chosen, waiting = np.append(chosen, -1), np.append(waiting, -1)
    values = [np.append(values_of(utterances, kind), np.int32(0)) for kind in kinds]
    missing = [target[k] - int(v[chosen].sum(dtype=np.int64)) for k, v in enumerate(values)]
    scales = [2**40 // max(1, target[kind]) for kind in kinds]
    for _ in range(_ADJUSTMENTS):
        out = chosen[-_WINDOW:]
        miss = np.zeros((len(out), len(waiting)), np.int64)
        for each, short, scale in zip(values, missing, scales, strict=True):
            miss += np.abs((each[out].astype(np.int64) + short)[:, None] - each[waiting]) * scale
        best = int(miss.argmin())
        if miss.flat[best] >= sum(abs(m) * s for m, s in zip(missing, scales, strict=True)):
            break
        i, j = divmod(best, len(waiting))
        i += len(chosen) - len(out)
        for k, each in enumerate(values):
            missing[k] += int(each[chosen[i]]) - int(each[waiting[j]])
        chosen[i], waiting[j] = waiting[j], chosen[i]
    return chosen[chosen >= 0]


def _sample(utterances: Utterances, count: int) -> Utterances:
    """Some of the utterances in random order; all of them where they are few."""
    total = len(utterances)
    if 2 * count < total:
        # Drawn with replacement: a permutation of millions would take long.
        places = hashes(count, _TRIAL, _TRIALS) % np.uint64(total)
    else:
        places = shuffled(total, _TRIAL, _TRIALS)[:count]
    return Utterances(utterances.frames[places], utterances.tokens[places])
