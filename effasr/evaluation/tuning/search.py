"""Search for the weights with the fewest word errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product

from effasr.evaluation.bootstrap import chance_of_best, probability_of_improvement
from effasr.evaluation.tuning.lists import NBestLists
from effasr.evaluation.tuning.weights import Weights
from effasr.evaluation.wer import ErrorCounts

_MOST_ROUNDS = 5

SURE = 0.95
"""Probability from which a gain is not taken for chance."""


def best_weights(
    lists: NBestLists,
    start: Weights,
    grids: Mapping[str, Sequence[float]],
    on_trial: Callable[[], None] | None = None,
) -> Weights:
    """Return weights that make fewer word errors on these lists, or ``start``.

    Coordinate descent over pairs of weights, as two may depend on each other: a language model
    favours short texts, which a bonus for words balances. A gain is taken for chance unless it is
    larger than the best of as many trials would have by chance; see `chance_of_best`. Then each
    weight goes back to its start, unless that makes more errors in most draws of the bootstrap. The
    result never makes more errors on these lists than ``start``.

    Args:
        lists: The n-best lists.
        start: Where the search begins.
        grids: Values of each weight to try; its start is tried as well.
        on_trial: Called after each trial.
    """
    before = lists.errors(start)
    best = _descend(lists, start, grids, on_trial)
    if chance_of_best(lists.word_errors(start), lists.tried()) > 1 - SURE:
        return start
    for name in grids:
        reverted = replace(best, **{name: getattr(start, name)})
        if not _is_better(lists.errors(reverted), lists.errors(best)):
            best = reverted
    return best if _is_better(before, lists.errors(best)) else start


def _descend(
    lists: NBestLists,
    start: Weights,
    grids: Mapping[str, Sequence[float]],
    on_trial: Callable[[], None] | None,
) -> Weights:
    """Return the weights with the fewest errors."""
    # Of equally good values, the nearest to the start is taken: it is tried first.
    values = {
        name: sorted({*grid, getattr(start, name)}, key=_distance(getattr(start, name)))
        for name, grid in grids.items()
    }
    best, fewest = start, lists.word_errors(start).sum()
    for _ in range(_MOST_ROUNDS):
        before = fewest
        for group in list(combinations(values, 2)) or [tuple(values)]:
            for chosen in product(*(values[name] for name in group)):
                tried = replace(best, **dict(zip(group, chosen, strict=True)))
                found = lists.word_errors(tried).sum()
                if found < fewest:
                    best, fewest = tried, found
                if on_trial is not None:
                    on_trial()
        if fewest == before:
            break
    return best


def _is_better(before: Sequence[ErrorCounts], after: Sequence[ErrorCounts]) -> bool:
    """Return whether the second makes fewer errors, in most draws of the utterances."""
    fewer = sum(one.errors for one in after) < sum(one.errors for one in before)
    return fewer and probability_of_improvement(before, after) >= SURE


def _distance(start: float) -> Callable[[float], float]:
    return lambda value: abs(value - start)
