"""One table of what host and device did, whichever profiler saw it. Times are ns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np


class Kind(IntEnum):
    KERNEL = 0
    COPY = 1
    FILL = 2
    GRAPH = 3
    """A whole CUDA graph, of which the profiler recorded no kernels."""
    OPERATOR = 4
    """A stretch of an operator on the CPU, where a trace has no GPU."""


WORK = np.dtype(
    [
        ("start", "i8"),
        ("end", "i8"),
        ("process", "i4"),
        ("device", "i4"),
        ("stream", "i8"),
        ("name", "i4"),
        ("kind", "i1"),
        ("correlation", "i8"),
        ("graph_node", "i8"),
        ("bytes", "i8"),
        # Of an operator or an external id: where it was called, when there is no launch.
        ("thread", "i8"),
        ("called", "i8"),
    ]
)
LAUNCH = np.dtype(
    [
        ("start", "i8"),
        ("end", "i8"),
        ("process", "i4"),
        ("thread", "i8"),
        ("name", "i4"),
        ("correlation", "i8"),
    ]
)
RANGE = np.dtype(
    [
        ("start", "i8"),
        ("end", "i8"),
        ("process", "i4"),
        ("thread", "i8"),
        ("name", "i4"),
        ("is_op", "?"),
        ("is_backward", "?"),
        ("sequence", "i8"),
        ("payload", "i8"),
        # The forward operator of a backward one: its thread and when it began.
        ("forward_thread", "i8"),
        ("forward_time", "i8"),
    ]
)
NONE = -1
"""Not known, in every column but those of times: a time is known where its thread is."""


@dataclass(slots=True)
class Process:
    source: str
    pid: int
    rank: int | None = None
    epoch: int = 0

    @property
    def label(self) -> str:
        return f"process {self.pid}" if self.rank is None else f"rank {self.rank}"


@dataclass(slots=True)
class Note:
    """A remark about the reliability of the figures: ``level`` is ok, note or warning."""

    level: str
    text: str


@dataclass(slots=True)
class Table:
    names: list[str] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    work: np.ndarray = field(default_factory=lambda: np.zeros(0, WORK))
    launches: np.ndarray = field(default_factory=lambda: np.zeros(0, LAUNCH))
    ranges: np.ndarray = field(default_factory=lambda: np.zeros(0, RANGE))
    overhead: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    notes: list[Note] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def has_gpu(self) -> bool:
        return bool((self.work["kind"] != Kind.OPERATOR).any())


class Names:
    def __init__(self) -> None:
        self.list: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.list)
            self.list.append(name)
        return number


def merge(tables: Iterable[Table]) -> Table:
    """Put the tables of several files into one; names are shared, processes are not."""
    names, merged = Names(), Table()
    facts: dict[str, list[str]] = {}
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    for table in tables:
        renamed = np.array([names.number(name) for name in table.names] or [0], np.int64)
        offset = len(merged.processes)
        columns = []
        for rows in (table.work, table.launches, table.ranges):
            rows = rows.copy()
            rows["name"] = renamed[rows["name"]]
            rows["process"] += offset
            columns.append(rows)
        overhead = table.overhead.copy()
        overhead[:, 0] += offset
        parts.append((*columns, overhead))
        merged.processes += table.processes
        merged.notes += table.notes
        for name, fact in table.facts.items():
            if fact not in facts.setdefault(name, []):
                facts[name].append(fact)
    merged.names = names.list
    merged.facts = {name: ", ".join(found) for name, found in facts.items()}
    if parts:
        work, launches, ranges, overhead = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        merged.work, merged.launches, merged.ranges, merged.overhead = (
            work,
            launches,
            ranges,
            overhead,
        )
    return merged


# Which forward operator a backward operator belongs to.
#
# autograd numbers the nodes of its graph; a forward operator that makes a node and the backward
# operator that evaluates it bear the same sequence number (torch.autograd.profiler.emit_nvtx).
# Operators that make no node, views among them, bear the number of the next one: of several
# forward operators of one number, the last is meant, as in PyTorch's own links.

_BACKWARD = re.compile(r"^autograd::engine::evaluate_function|Backward\d*$|AccumulateGrad$")


def is_backward_name(name: str) -> bool:
    return _BACKWARD.search(name) is not None


def link_by_sequence(ranges: np.ndarray) -> None:
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


def link_by_flow(
    ranges: np.ndarray, begins: dict[int, tuple[int, int]], ends: dict[int, tuple[int, int]]
) -> None:
    found = {
        (thread, time): begins[flow] for flow, (thread, time) in ends.items() if flow in begins
    }
    if not found:
        return
    for index in np.flatnonzero(ranges["is_backward"]).tolist():
        key = (int(ranges["thread"][index]), int(ranges["start"][index]))
        if key in found:
            ranges["forward_thread"][index], ranges["forward_time"][index] = found[key]


# The innermost range around a moment of a thread.


def sort_key(ranges: np.ndarray, order_of_names: np.ndarray | None = None) -> np.ndarray:
    """Order by begin, outer ranges first."""
    names = ranges["name"] if order_of_names is None else order_of_names[ranges["name"]]
    return np.lexsort((names, -ranges["end"], ranges["start"]))


def parents(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the innermost other range in which each range begins, or -1; int64 (n,)."""
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
