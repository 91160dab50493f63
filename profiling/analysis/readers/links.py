"""Which forward operator a backward operator belongs to.

autograd numbers the nodes of its graph; a forward operator that makes a node and the backward
operator that evaluates it bear the same sequence number (torch.autograd.profiler.emit_nvtx).
Operators that make no node, views among them, bear the number of the next one: of several
forward operators of one number, the last is meant, as in PyTorch's own links.
"""

from __future__ import annotations

import re

import numpy as np

from analysis.readers.table import NONE

_BACKWARD = re.compile(r"^autograd::engine::evaluate_function|Backward\d*$|AccumulateGrad$")


def is_backward(name: str) -> bool:
    """Return whether an operator of this name is part of the backward."""
    return _BACKWARD.search(name) is not None


def by_sequence(ranges: np.ndarray) -> None:
    """Fill in the forward operator of every backward one that has a sequence number.

    Args:
        ranges: Rows of `RANGE`; changed in place, where no forward operator is known yet.
    """
    numbered = ranges["sequence"] != NONE
    forward = np.flatnonzero(numbered & ~ranges["is_backward"])
    backward = np.flatnonzero(numbered & ranges["is_backward"] & (ranges["forward_thread"] == NONE))
    if not len(forward) or not len(backward):
        return
    # Sorted by number and time: the last with this number, before the backward one begins.
    order = np.lexsort(
        (
            ranges["start"][forward],
            ranges["sequence"][forward],
            ranges["process"][forward],
        )
    )
    forward = forward[order]
    keys = list(
        zip(
            ranges["process"][forward].tolist(),
            ranges["sequence"][forward].tolist(),
            strict=True,
        )
    )
    last: dict[tuple[int, int], list[int]] = {}
    for key, index in zip(keys, forward.tolist(), strict=True):
        last.setdefault(key, []).append(index)
    starts = ranges["start"]
    for index in backward.tolist():
        key = (int(ranges["process"][index]), int(ranges["sequence"][index]))
        before = [i for i in last.get(key, ()) if starts[i] < starts[index]]
        if before:
            ranges["forward_thread"][index] = ranges["thread"][before[-1]]
            ranges["forward_time"][index] = starts[before[-1]]


def by_flow(
    ranges: np.ndarray, begins: dict[int, tuple[int, int]], ends: dict[int, tuple[int, int]]
) -> None:
    """Fill in forward operators from flow events, which the trace draws as arrows.

    Args:
        ranges: Rows of `RANGE` of one process; changed in place.
        begins: Thread and time of the forward operator, by flow number.
        ends: Thread and time of the backward operator, likewise.
    """
    found = {
        (thread, time): begins[flow] for flow, (thread, time) in ends.items() if flow in begins
    }
    if not found:
        return
    for index in np.flatnonzero(ranges["is_backward"]).tolist():
        key = (int(ranges["thread"][index]), int(ranges["start"][index]))
        if key in found:
            ranges["forward_thread"][index], ranges["forward_time"][index] = found[key]
