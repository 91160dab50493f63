"""On a trace without a GPU, operators are the work: each counts while none inside it runs."""

from __future__ import annotations

import numpy as np

from analysis.readers.nesting import parents, sort_key
from analysis.readers.table import NONE, WORK, Kind


def work(ranges: np.ndarray) -> np.ndarray:
    """Return the stretches of time in which each operator itself runs, without those that it calls.

    Args:
        ranges: Rows of `RANGE`, of one process.

    Returns:
        Rows of `WORK`: one or more for each operator that has time of its own. ``correlation`` is
        the number of the row of ``ranges``, ``stream`` and ``thread`` its thread.
    """
    rows = np.flatnonzero(ranges["is_op"])
    pieces = []
    for thread in np.unique(ranges["thread"][rows]):
        own = rows[ranges["thread"][rows] == thread]
        own = own[sort_key(ranges[own])]
        pieces.append(_pieces(ranges, own))
    if not pieces:
        return np.zeros(0, WORK)
    index, begin, end = (np.concatenate(column) for column in zip(*pieces, strict=True))
    result = np.zeros(len(index), WORK)
    result["start"], result["end"] = begin, end
    result["device"] = NONE
    result["graph_node"] = NONE
    result["kind"] = Kind.OPERATOR
    result["correlation"] = index
    for name in ("process", "thread", "name"):
        result[name] = ranges[name][index]
    result["stream"], result["called"] = result["thread"], ranges["start"][index]
    return result


def _pieces(ranges: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which operator of a thread runs when: (row, begin, end), each int64 (n,).

    At every edge the innermost operator is the last that began and has not ended.
    """
    starts, ends = ranges["start"][rows], ranges["end"][rows]
    edges = np.unique(np.concatenate([starts, ends]))
    if len(edges) < 2:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing
    begins, stops = edges[:-1], edges[1:]
    parent = parents(starts, ends)
    inner = np.searchsorted(starts, begins, side="right") - 1
    while True:
        over = (inner >= 0) & (ends[np.maximum(inner, 0)] < stops)
        if not over.any():
            break
        inner[over] = parent[inner[over]]
    kept = inner >= 0
    inner, begins, stops = inner[kept], begins[kept], stops[kept]
    # Stretches of one operator that follow on one another are one.
    first = np.ones(len(inner), bool)
    first[1:] = (inner[1:] != inner[:-1]) | (begins[1:] != stops[:-1])
    last = np.append(first[1:], True) if len(first) else first
    return rows[inner[first]], begins[first], stops[last]
