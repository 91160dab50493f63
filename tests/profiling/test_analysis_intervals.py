"""Interval sets, against sets of whole nanoseconds."""

from __future__ import annotations

import numpy as np
from analysis import intervals
from hypothesis import given
from hypothesis import strategies as st

spans = st.lists(st.tuples(st.integers(-30, 60), st.integers(0, 15)), max_size=12)


def moments(found: list[tuple[int, int]]) -> set[int]:
    return {time for begin, length in found for time in range(begin, begin + length)}


def made(found: list[tuple[int, int]]) -> np.ndarray:
    begins = np.array([begin for begin, _ in found], np.int64)
    return intervals.union(begins, begins + np.array([n for _, n in found], np.int64))


def listed(found: np.ndarray) -> set[int]:
    return {time for begin, end in found.tolist() for time in range(begin, end)}


def is_a_set(found: np.ndarray) -> bool:
    flat = found.ravel()
    return found.dtype == np.int64 and bool((np.diff(flat) > 0).all())


@given(spans, spans)
def test_sets_are_those_of_their_moments(one: list, other: list) -> None:
    a, b = made(one), made(other)
    for result, expected in (
        (a, moments(one)),
        (intervals.subtract(a, b), moments(one) - moments(other)),
        (intervals.intersect(a, b), moments(one) & moments(other)),
        (intervals.join(a, b), moments(one) | moments(other)),
        (intervals.clip(a, -5, 20), moments(one) & set(range(-5, 20))),
    ):
        assert is_a_set(result)
        assert listed(result) == expected
        assert intervals.measure(result) == len(expected)


@given(spans, spans)
def test_what_is_covered_is_counted_exactly(one: list, asked: list) -> None:
    a = made(one)
    begins = np.array([begin for begin, _ in asked], np.int64)
    ends = begins + np.array([n for _, n in asked], np.int64)
    expected = [len(moments(one) & set(range(b, e))) for b, e in zip(begins, ends, strict=True)]
    assert intervals.covered(a, begins, ends).tolist() == expected
    assert intervals.within(a, begins).tolist() == [b in moments(one) for b in begins.tolist()]


@given(spans, spans, st.randoms())
def test_increments_share_out_a_union(one: list, whole: list, random) -> None:
    begins = np.array([begin for begin, _ in one], np.int64)
    ends = begins + np.array([n for _, n in one], np.int64)
    turns, inside = np.arange(len(one)), made(whole)
    added = intervals.increments(begins, ends, turns, inside)
    assert (added >= 0).all()
    assert added.sum() == len(moments(one) & moments(whole))
    order = list(range(len(one)))
    random.shuffle(order)
    shuffled = intervals.increments(begins[order], ends[order], turns[order], inside)
    assert shuffled.tolist() == added[order].tolist()


@given(spans, spans)
def test_pieces_lie_in_one_window_each_and_lose_nothing(one: list, other: list) -> None:
    windows = made(other)
    begins = np.array([begin for begin, _ in one], np.int64)
    ends = begins + np.array([n for _, n in one], np.int64)
    item, window, first, last = intervals.split(begins, ends, windows)
    assert (last > first).all()
    assert (windows[window, 0] <= first).all()
    assert (last <= windows[window, 1]).all()
    sums = np.zeros(len(one), np.int64)
    np.add.at(sums, item, last - first)
    assert sums.tolist() == intervals.covered(windows, begins, ends).tolist()


def test_two_that_begin_together_count_the_shorter_first() -> None:
    begins, ends = np.array([0, 0]), np.array([10, 4])
    added = intervals.increments(begins, ends, np.array([0, 1]), np.array([[0, 20]]))
    assert added.tolist() == [6, 4]
