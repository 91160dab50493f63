"""Bootstrap confidence of word error rates and BLEU, and of their differences."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from effasr.evaluation.translation import TranslationCounts
from effasr.evaluation.wer import ErrorCounts

_DRAWS = 1000
_SEED = 0
_AT_A_TIME = 2_000_000  # indices drawn at a time, to limit the memory for large sets


# Counts of an utterance, whose sums give a rate.
Counts: TypeAlias = ErrorCounts | TranslationCounts


def interval(parts: Sequence[Counts], confidence: float = 0.95) -> tuple[float, float]:
    """Return a bootstrap confidence interval of the rate of a set; deterministic.

    Utterances are drawn with replacement, a thousand times; the interval holds the middle
    ``confidence`` of the rates. It covers the choice of utterances, not the variance of training.

    Bisani and Ney, 2004, https://doi.org/10.1109/ICASSP.2004.1326009.
    """
    rates = _rates(parts)
    rates = rates[~np.isnan(rates)]
    if not rates.size:
        return math.nan, math.nan
    low, high = np.quantile(rates, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def rate(parts: Sequence[Counts]) -> float:
    if not parts:
        return math.nan
    sums = np.array([item.statistics for item in parts], dtype=np.int64).sum(axis=0)
    return float(type(parts[0]).rates(sums[:, None])[0])


def probability_of_improvement(before: Sequence[Counts], after: Sequence[Counts]) -> float:
    """Return the share of draws in which the second system is better than the first.

    The same utterances are drawn for both, so that their difficulty cancels out. Draws in which
    both are equal count half.

    Bisani and Ney, 2004, https://doi.org/10.1109/ICASSP.2004.1326009.
    """
    if len(before) != len(after):
        raise ValueError(
            f"`after` must have the {len(before)} utterances of `before`, but has {len(after)}."
        )
    gains = _rates(after) - _rates(before)
    gains = gains[~np.isnan(gains)]
    if not gains.size:
        return math.nan
    is_better = gains > 0 if before[0].metric.higher_is_better else gains < 0
    return float((is_better + 0.5 * (gains == 0)).mean())


def chance_of_best(before: np.ndarray, tried: np.ndarray) -> float:
    """Return how likely the gain of the best of many systems is by chance; deterministic.

    The best of many makes fewer errors on the set that it was chosen on even where all are alike.
    Utterances are drawn with replacement, a thousand times, to see how far the largest of all
    gains, each in units of its standard deviation, strays from its own mean.

    ``before``: int64 (n,), word errors of each utterance by the first system; ``tried``: int64 (m,
    n), those of all systems that were tried.

    Romano and Wolf, 2005, https://doi.org/10.1111/j.1468-0262.2005.00615.x.
    """
    gains = (before - tried).astype(np.float64)
    if not gains.size:
        return 1.0
    count, totals = len(before), gains.sum(axis=1)
    spread = gains.std(axis=1) * math.sqrt(count)
    best = int(totals.argmax())
    if totals[best] <= 0 or spread[best] == 0:
        return 1.0
    varies = spread > 0
    gains, sums, spread = gains[varies], totals[varies, None], spread[varies, None]
    rng, most = np.random.default_rng(_SEED), []
    step = max(1, min(_DRAWS, _AT_A_TIME // max(gains.shape)))
    for begin in range(0, _DRAWS, step):
        drawn = rng.multinomial(count, np.full(count, 1 / count), size=min(step, _DRAWS - begin))
        most.append(((gains @ drawn.T - sums) / spread).max(axis=0))
    statistic = totals[best] / spread[int(varies[:best].sum()), 0]
    return float((np.concatenate(most) >= statistic).mean())


def _rates(parts: Sequence[Counts]) -> np.ndarray:
    """Return the rate of every draw; NaN where it is undefined."""
    if not parts:
        return np.zeros(0)
    table = np.array([item.statistics for item in parts], dtype=np.int64).T
    count = table.shape[1]
    rng = np.random.default_rng(_SEED)
    step = max(1, 2 * _AT_A_TIME // table.size)
    sums = [
        table[:, rng.integers(count, size=(min(step, _DRAWS - begin), count))].sum(axis=2)
        for begin in range(0, _DRAWS, step)
    ]
    return type(parts[0]).rates(np.concatenate(sums, axis=1))
