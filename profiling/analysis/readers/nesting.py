"""The innermost range around a moment of a thread."""

from __future__ import annotations

import numpy as np


def sort_key(ranges: np.ndarray, order_of_names: np.ndarray | None = None) -> np.ndarray:
    """Order by begin, outer ranges first.

    Args:
        ranges: Rows of `RANGE`.
        order_of_names: Place of each name among all: decides between ranges of the same span, so
            that the order of the rows does not.
    """
    names = ranges["name"] if order_of_names is None else order_of_names[ranges["name"]]
    return np.lexsort((names, -ranges["end"], ranges["start"]))


def parents(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the innermost other range in which each range begins, or -1; int64 (n,).

    Args:
        starts: Sorted as `sort_key` sorts.
        ends: Ends of the same ranges. They need not nest: ranges that are started and ended, not
            pushed and popped, may cross.
    """
    parent = [-1] * len(starts)
    start_list, end_list = starts.tolist(), ends.tolist()
    for index in range(1, len(start_list)):
        start = start_list[index]
        candidate = index - 1
        # What has ended stays ended: nothing is passed over twice.
        while candidate >= 0 and end_list[candidate] <= start:
            candidate = parent[candidate]
        parent[index] = candidate
    return np.array(parent, np.int64)


class Nest:
    """Ranges by thread, to ask for the innermost one.

    Args:
        ranges: Rows of `RANGE`.
        rows: Rows to consider.
        order_of_names: Order of the names, as in `sort_key`.

    Attributes:
        parent: int64, for each row of ``ranges``: the row of the range around it, or -1.
    """

    def __init__(self, ranges: np.ndarray, rows: np.ndarray, order_of_names: np.ndarray) -> None:
        self.parent = np.full(len(ranges), -1, np.int64)
        self._ends = ranges["end"]
        self._threads: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        rows = rows[sort_key(ranges[rows], order_of_names)]
        process, thread = ranges["process"][rows], ranges["thread"][rows]
        for key in sorted(set(zip(process.tolist(), thread.tolist(), strict=True))):
            own = rows[(process == key[0]) & (thread == key[1])]
            starts = ranges["start"][own]
            inner = parents(starts, ranges["end"][own])
            self.parent[own] = np.where(inner >= 0, own[inner], -1)
            self._threads[key] = own, starts

    def find(
        self, process: np.ndarray, thread: np.ndarray, begin: np.ndarray, end: np.ndarray
    ) -> np.ndarray:
        """Return the innermost range around each interval, as its row or -1; int64 (n,).

        A range holds [begin, end] where it begins not later and ends not earlier, as in NVIDIA's
        nvtx_kern_sum.
        """
        found = np.full(len(begin), -1, np.int64)
        for (own_process, own_thread), (rows, starts) in self._threads.items():
            asked = np.flatnonzero((process == own_process) & (thread == own_thread))
            if not len(asked):
                continue
            place = np.searchsorted(starts, begin[asked], side="right") - 1
            inner = np.where(place >= 0, rows[place], -1)
            stop = end[asked]
            while True:
                over = (inner >= 0) & (self._ends[inner] < stop)
                if not over.any():
                    break
                inner[over] = self.parent[inner[over]]
            found[asked] = inner
        return found
