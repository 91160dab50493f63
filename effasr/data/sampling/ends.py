"""Carries the utterances that do not fill a whole step over to the next epoch.

After epoch e, (e + 1) passes over the corpus are due, and as many whole steps as these fill have
been made. The rest, less than a step, is a random subset D(e) of the corpus of known size. Epoch e
therefore plans the corpus without D(e) and with D(e - 1): it fills whole steps, every utterance is
planned once in each pass, and any epoch can be planned without those before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from effasr.data.batch import StaticShape
from effasr.data.sampling.filling import Utterances, budgets, fill, scarcest, values_of
from effasr.data.sampling.plan import hashes, shuffled

_SHARES = (9990, 9980, 9970, 9950, 9900, 9800, 9700, 9500, 9200, 9000, 8500, 8000, 7000, 6000)
_SHARES += (5000, 4000, 3000, 2000, 1000)
"""Average fill of a budget that is tried, in 1/10,000."""
_RANDOM = 4
"""Trials without a reserve, which makes steps unequal."""
_TRIED = 128
"""Micro-batches of a trial."""
_TRIALS = 8
"""Most trials; as many are made where micro-batches have few utterances, and results differ."""
_WINDOW = 256
"""Utterances at the border of D(e) that may be exchanged to adjust its sums."""
_ADJUSTMENTS = 64
"""Most exchanges of these."""
_TRIAL = 0x7472_6961_6C
_CARRY = 0x6361_7272_79
"""Added to seeds, so that these orders are unrelated to the epochs' orders."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Expected content of a micro-batch."""

    scarce: int  # Quantity that runs out first, as an index into `filling.budgets`
    amount: int  # Amount of that quantity in a micro-batch


def capacity(utterances: Utterances, shape: StaticShape) -> Capacity:
    """Measure how full micro-batches of these utterances become, by filling some."""
    totals, limits = utterances.totals(), budgets(shape)
    scarce = scarcest(totals, limits)

    def holds(share: int) -> int:
        return max(1, limits[scarce] * share // 10_000)

    # Twice what is needed, to select a subset with the proportion of frames to tokens.
    count = -(-2 * _TRIED * limits[scarce] * len(utterances) // totals[scarce])
    # Draw some of the utterances in random order; all of them where they are few.
    total = len(utterances)
    if 2 * count < total:
        # Drawn with replacement: a permutation of millions would take long.
        places = hashes(count, _TRIAL, _TRIALS) % np.uint64(total)
    else:
        places = shuffled(total, _TRIAL, _TRIALS)[:count]
    sample = utterances.take(places)

    def reached(share: int, ways: Sequence[bool]) -> bool:
        # Whether micro-batches reach this average amount in every trial.
        amount = holds(share)
        micro_batches = min(_TRIED, sample.totals()[scarce] // amount)
        if not micro_batches:
            return True
        for trial in range(max(1, min(_TRIALS, _TRIED // micro_batches))):
            part = matched(sample, totals, scarce, micro_batches * amount, _TRIAL, trial)
            part = part[shuffled(len(part), _TRIAL, trial)]
            some = sample.take(part)
            if not any(fill(some, shape, micro_batches, reserve=reserve) for reserve in ways):
                return False
        return True

    for share in _SHARES[:_RANDOM]:
        if reached(share, (False,)):
            return Capacity(scarce, holds(share))
    # Bisection for the largest share that is reached.
    low, high = 0, len(_SHARES) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(_SHARES[middle], (False, True)) else (middle + 1, high)
    # A share that was just reached in the trials may not be reached each time.
    return Capacity(scarce, holds(_SHARES[min(low + 1, len(_SHARES) - 1)]))


class Ends:
    """Utterances carried over the end of each epoch of a run."""

    def __init__(
        self, utterances: Utterances, holds: Capacity, micro_batches: int, seed: int
    ) -> None:
        """Prepare for a corpus of which each pass fills at least one step."""
        self._utterances, self._seed = utterances, seed
        self._scarce = holds.scarce
        self._totals = utterances.totals()
        self._step = holds.amount * micro_batches

    @property
    def fills_a_step(self) -> bool:
        """Whether a pass fills a step; otherwise nothing can be carried over."""
        return self._totals[self._scarce] >= self._step

    @property
    def least_steps(self) -> int:
        """Steps that a pass needs, with the last one partly filled."""
        return max(1, -(-self._totals[self._scarce] // self._step))

    def num_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch, at least 1."""
        total = self._totals[self._scarce]
        return (epoch + 1) * total // self._step - epoch * total // self._step

    def carried(self, epoch: int) -> np.ndarray:
        """Return D(e), the utterances that an epoch leaves to the next: int64, ascending."""
        amount = (epoch + 1) * self._totals[self._scarce] % self._step
        if epoch < 0 or not amount:
            return np.arange(0)
        seed = self._seed + _CARRY
        return matched(self._utterances, self._totals, self._scarce, amount, seed, epoch)


def matched(
    utterances: Utterances,
    totals: Sequence[int],
    scarce: int,
    amount: int,
    seed: int,
    number: int,
) -> np.ndarray:
    """Draw a random subset of the utterances with a given proportion of frames to tokens."""
    order = _first(utterances, scarce, amount, seed, number)
    ends = np.cumsum(values_of(utterances, scarce)[order], dtype=np.int64)
    count = int(np.searchsorted(ends, amount, side="right"))
    kinds = [0, 1] if scarce != 2 else [0, 1, 2]
    kinds += range(3, len(totals))
    target = [totals[kind] * amount // totals[scarce] for kind in kinds]
    values = [values_of(utterances, kind) for kind in kinds]
    chosen, waiting = order[:count], order[count : count + _WINDOW]
    missing = [t - int(v[chosen].sum(dtype=np.int64)) for t, v in zip(target, values, strict=True)]
    part, _ = exchanged(values, missing, target, chosen, waiting)
    return np.sort(part)


def _first(utterances: Utterances, scarce: int, amount: int, seed: int, number: int) -> np.ndarray:
    """Return the first utterances of a random order, somewhat more than the amount."""
    count, values = len(utterances), hashes(len(utterances), seed, number)
    # Sorting all of them would be slow for millions.
    share = amount / utterances.totals()[scarce] * 1.25 + 4 * _WINDOW / count
    if share < 1:
        some = np.flatnonzero(values < np.uint64(int(share * 2**64)))
        if int(values_of(utterances, scarce)[some].sum(dtype=np.int64)) > amount:
            return some[np.argsort(values[some], kind="stable")]
    return np.argsort(values, kind="stable")


def exchanged(
    values: Sequence[np.ndarray],  # each quantity of the utterances, int32 (n,)
    missing: Sequence[int],  # of the target of each quantity; negative for too much
    units: Sequence[int],  # amount of each quantity that counts as much as that of the others
    chosen: np.ndarray,  # int (c,), indices of utterances; the last 256 may be exchanged
    waiting: np.ndarray,  # int (w,), indices of utterances that are not chosen
) -> tuple[np.ndarray, np.ndarray]:
    """Exchange chosen utterances for waiting ones, to meet the target of each quantity."""
    # Index -1 stands for no utterance.
    chosen, waiting = np.append(chosen, -1), np.append(waiting, -1)
    values, missing = [np.append(v, np.int32(0)) for v in values], list(missing)
    scales = [2**40 // max(1, unit) for unit in units]
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
    return chosen[chosen >= 0], waiting[waiting >= 0]
