"""Sets of moments as arrays of half-open intervals: wall time is the length of a union.

A set is int64 (n, 2), sorted, disjoint, without empty intervals: nanoseconds [begin, end). All
results are exact integers, so that the parts of a whole add up to it.
"""

from collections.abc import Callable

import numpy as np

EMPTY = np.zeros((0, 2), np.int64)


def union(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    is_positive = ends > begins
    begins, ends = np.asarray(begins)[is_positive], np.asarray(ends)[is_positive]
    if not len(begins):
        return EMPTY
    order = np.argsort(begins, kind="stable")
    begins, reached = begins[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], begins[1:] > reached[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([begins[first], reached[last]], axis=1).astype(np.int64)


def join(*sets: np.ndarray) -> np.ndarray:
    everything = np.concatenate(sets)
    return union(everything[:, 0], everything[:, 1])


def subtract(whole: np.ndarray, part: np.ndarray) -> np.ndarray:
    return _where(whole, part, lambda in_whole, in_part: in_whole & ~in_part)


def intersect(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return _where(first, second, lambda in_one, in_other: in_one & in_other)


def clip(moments: np.ndarray, begin: int, end: int) -> np.ndarray:
    first = np.searchsorted(moments[:, 1], begin, side="right")
    last = np.searchsorted(moments[:, 0], end, side="left")
    return np.clip(moments[first:last], begin, end)


def measure(moments: np.ndarray) -> int:
    return int((moments[:, 1] - moments[:, 0]).sum())


def covered(moments: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return how much of each interval [begin, end) lies in the set, ns, int64 (n,)."""
    before = lambda times: _elapsed(moments, np.asarray(times, np.int64))
    return before(ends) - before(begins)


def within(moments: np.ndarray, times: np.ndarray) -> np.ndarray:
    if not len(moments):
        return np.zeros(len(times), bool)
    index = np.searchsorted(moments[:, 0], times, side="right") - 1
    return (index >= 0) & (np.asarray(times) < moments[index, 1])


def increments(
    begins: np.ndarray, ends: np.ndarray, turns: np.ndarray, moments: np.ndarray
) -> np.ndarray:
    """Return the time that each interval adds to earlier ones inside a set; ns, int64 (n,).

    The sum is the part of the set covered by the union: wall time divided among overlapping
    intervals. Of two that begin together, the one that ends first counts first and the other from
    its end on; of two equal ones, the one with the lower ``turns`` counts.
    """
    added = np.zeros(len(begins), np.int64)
    if not len(begins):
        return added
    order = np.lexsort((turns, ends, begins))
    begins, ends = np.asarray(begins)[order], np.asarray(ends)[order]
    reached = np.concatenate([begins[:1], np.maximum.accumulate(ends)[:-1]])
    added[order] = covered(moments, np.minimum(np.maximum(begins, reached), ends), ends)
    return added


def split(
    begins: np.ndarray, ends: np.ndarray, windows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    first = np.searchsorted(windows[:, 1], begins, side="right")
    counts = np.maximum(np.searchsorted(windows[:, 0], ends, side="left") - first, 0)
    item = np.repeat(np.arange(len(begins)), counts)
    offset = np.arange(len(item)) - np.repeat(np.cumsum(counts) - counts, counts)
    window = np.repeat(first, counts) + offset
    begin = np.maximum(begins[item], windows[window, 0])
    end = np.minimum(ends[item], windows[window, 1])
    is_positive = end > begin
    return item[is_positive], window[is_positive], begin[is_positive], end[is_positive]


def _elapsed(moments: np.ndarray, times: np.ndarray) -> np.ndarray:
    if not len(moments):
        return np.zeros(times.shape, np.int64)
    lengths = moments[:, 1] - moments[:, 0]
    complete = np.concatenate([[0], np.cumsum(lengths)])
    index = np.searchsorted(moments[:, 0], times, side="right")
    inside = np.minimum(times - moments[index - 1, 0], lengths[index - 1])
    return np.where(index > 0, complete[index - 1] + inside, 0)


def _where(
    first: np.ndarray, second: np.ndarray, keep: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return the moments for which ``keep`` holds, given whether each stretch is in either set."""
    # Sorted and mostly merged already: a stable sort is far faster than `np.unique`.
    edges = np.sort(np.concatenate([first.ravel(), second.ravel()]), kind="stable")
    if len(edges) < 2:
        return EMPTY
    begins, ends = edges[:-1], edges[1:]
    is_chosen = (ends > begins) & keep(within(first, begins), within(second, begins))
    return union(begins[is_chosen], ends[is_chosen])
