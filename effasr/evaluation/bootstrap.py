"""Bootstrap confidence of word error rates and of their differences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from effasr.evaluation.wer import ErrorCounts

_DRAWS = 1000
_SEED = 0
_AT_A_TIME = 2_000_000
"""Indices drawn at a time, to limit the memory for large sets."""


def interval(parts: Sequence[ErrorCounts], confidence: float = 0.95) -> tuple[float, float]:
    """Return a bootstrap confidence interval of the word error rate of a set; deterministic.

    Utterances are drawn with replacement, a thousand times; the interval holds the middle
    ``confidence`` of the rates. It covers the choice of utterances, not the variance of training.

    Args:
        parts: The counts of each utterance.
        confidence: Share of the draws in the interval.

    Returns:
        Its ends; NaN where no reference has a word.

    References:
        Bisani and Ney, 2004, https://doi.org/10.1109/ICASSP.2004.1326009.
    """
    rates = _rates(_table(parts))
    if not rates.size:
        return math.nan, math.nan
    low, high = np.quantile(rates, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def probability_of_improvement(
    before: Sequence[ErrorCounts], after: Sequence[ErrorCounts]
) -> float:
    """Return the share of draws in which the second system makes fewer word errors than the first.

    The same utterances are drawn for both, so that their difficulty cancels out. Draws with equally
    many errors count half.

    Args:
        before: The counts of each utterance.
        after: Errors of the same utterances, in the same order.

    Returns:
        From 0 to 1; NaN where no reference has a word.

    Raises:
        ValueError: The two are of unequal length.

    References:
        Bisani and Ney, 2004, https://doi.org/10.1109/ICASSP.2004.1326009.
    """
    if len(before) != len(after):
        raise ValueError(
            f"`after` must have the {len(before)} utterances of `before`, but has {len(after)}."
        )
    errors = np.array([one.errors for one in before]) - np.array([one.errors for one in after])
    gains = _sums(np.stack([errors, [one.words for one in before]]))
    gains = gains[:, gains[1] > 0]
    if not gains.size:
        return math.nan
    return float(((gains[0] > 0) + 0.5 * (gains[0] == 0)).mean())


def _table(parts: Sequence[ErrorCounts]) -> np.ndarray:
    """Return errors and words, int64 (2, n)."""
    return np.array([[one.errors for one in parts], [one.words for one in parts]], dtype=np.int64)


def _rates(table: np.ndarray) -> np.ndarray:
    errors, words = _sums(table)
    return errors[words > 0] / words[words > 0]


def _sums(table: np.ndarray) -> np.ndarray:
    """Return the sums of every draw: (2, n) to (2, draws)."""
    count = table.shape[1]
    if not count:
        return np.zeros((2, 0), dtype=np.int64)
    rng = np.random.default_rng(_SEED)
    step = max(1, _AT_A_TIME // count)
    sums = [
        table[:, rng.integers(count, size=(min(step, _DRAWS - begin), count))].sum(axis=2)
        for begin in range(0, _DRAWS, step)
    ]
    return np.concatenate(sums, axis=1)
