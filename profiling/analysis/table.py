"""One table of what host and device did, whichever profiler saw it. Times are ns."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np


class Kind(IntEnum):
    KERNEL = 0
    COPY = 1
    FILL = 2
    GRAPH = 3  # a whole CUDA graph, of which the profiler recorded no kernels
    OPERATOR = 4  # a stretch of an operator on the CPU, where a trace has no GPU


_SPAN = {"start": "i8", "end": "i8", "process": "i4"}


def _columns(**types: str) -> np.dtype:
    return np.dtype([*(_SPAN | types).items()])


WORK = _columns(
    **{"device": "i4", "stream": "i8", "name": "i4", "kind": "i1", "correlation": "i8"},
    **{"graph_node": "i8", "bytes": "i8"},
    # Of an operator or an external id: where it was called, when there is no launch.
    **{"thread": "i8", "called": "i8"},
)
LAUNCH = _columns(thread="i8", name="i4", correlation="i8")
RANGE = _columns(
    **{"thread": "i8", "name": "i4", "is_op": "?", "is_backward": "?"},
    **{"sequence": "i8", "payload": "i8"},
    # The forward operator of a backward one: its thread and when it began.
    **{"forward_thread": "i8", "forward_time": "i8"},
)
NONE = -1  # not known, in every column but those of times: a time is known where its thread is


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

    def matches(self, pattern: re.Pattern[str]) -> np.ndarray:
        return np.array([pattern.match(name) is not None for name in self.names], bool)

    def annotations(
        self, process: int, thread: int | None = None, pattern: re.Pattern[str] | None = None
    ) -> np.ndarray:
        """Return the rows of a process' ranges that are no operators."""
        ranges = self.ranges
        chosen = (ranges["process"] == process) & ~ranges["is_op"]
        if thread is not None:
            chosen &= ranges["thread"] == thread
        rows = np.flatnonzero(chosen)
        return rows if pattern is None else rows[self.matches(pattern)[ranges["name"][rows]]]


class Names:
    def __init__(self, *names: str) -> None:
        self.list = list(names)
        self._numbers = {name: number for number, name in enumerate(names)}

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
    parts = [(merged.work, merged.launches, merged.ranges, merged.overhead)]
    for table in tables:
        renamed = np.array([names.number(name) for name in table.names] or [0], np.int64)
        offset = len(merged.processes)
        columns = table.work.copy(), table.launches.copy(), table.ranges.copy()
        for rows in columns:
            rows["name"] = renamed[rows["name"]]
            rows["process"] += offset
        parts.append((*columns, np.add(table.overhead, [offset, 0, 0])))
        merged.processes += table.processes
        merged.notes += table.notes
        for name, fact in table.facts.items():
            if fact not in facts.setdefault(name, []):
                facts[name].append(fact)
    merged.names = names.list
    merged.facts = {name: ", ".join(texts) for name, texts in facts.items()}
    merged.work, merged.launches, merged.ranges, merged.overhead = (
        np.concatenate(column) for column in zip(*parts, strict=True)
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
    starts = ranges["start"]
    keys = ranges[["process", "sequence"]].tolist()
    earlier: dict[tuple[int, int], list[int]] = {}
    for index in forward[np.argsort(starts[forward], kind="stable")].tolist():
        earlier.setdefault(keys[index], []).append(index)
    for index in backward.tolist():
        before = [i for i in earlier.get(keys[index], ()) if starts[i] < starts[index]]
        if before:
            ranges["forward_thread"][index] = ranges["thread"][before[-1]]
            ranges["forward_time"][index] = starts[before[-1]]


def link_by_flow(
    ranges: np.ndarray, begins: dict[int, tuple[int, int]], ends: dict[int, tuple[int, int]]
) -> None:
    forwards = {end: begins[flow] for flow, end in ends.items() if flow in begins}
    for index in np.flatnonzero(ranges["is_backward"]).tolist() if forwards else ():
        key = (int(ranges["thread"][index]), int(ranges["start"][index]))
        if key in forwards:
            ranges["forward_thread"][index], ranges["forward_time"][index] = forwards[key]


# The innermost range around a moment of a thread.


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


def outermost(ranges: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return those of the rows that begin in no other one, by begin."""
    rows = rows[np.lexsort((-ranges["end"][rows], ranges["start"][rows]))]
    reached = np.maximum.accumulate(ranges["end"][rows])
    return rows[np.append(True, ranges["start"][rows][1:] >= reached[:-1])[: len(rows)]]


def busiest_thread(ranges: np.ndarray) -> int:
    """Return the thread with the longest ranges, or `NONE`."""
    threads, position = np.unique(ranges["thread"], return_inverse=True)
    spent = np.zeros(len(threads), np.int64)
    np.add.at(spent, position, ranges["end"] - ranges["start"])
    return int(threads[np.argmax(spent)]) if len(threads) else NONE


class Nest:
    def __init__(
        self, ranges: np.ndarray, rows: np.ndarray, order_of_names: np.ndarray | None = None
    ) -> None:
        self.parent = np.full(len(ranges), -1, np.int64)
        self._ends = ranges["end"]
        self._threads: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        names = ranges["name"][rows]
        names = names if order_of_names is None else order_of_names[names]
        # By begin, outer ranges first.
        rows = rows[np.lexsort((names, -ranges["end"][rows], ranges["start"][rows]))]
        process, thread = ranges["process"][rows], ranges["thread"][rows]
        for key in sorted(set(zip(process.tolist(), thread.tolist(), strict=True))):
            chosen = rows[(process == key[0]) & (thread == key[1])]
            starts = ranges["start"][chosen]
            inner = parents(starts, ranges["end"][chosen])
            self.parent[chosen] = np.where(inner >= 0, chosen[inner], -1)
            self._threads[key] = chosen, starts

    def find(
        self, process: np.ndarray, thread: np.ndarray, begin: np.ndarray, end: np.ndarray
    ) -> np.ndarray:
        """Return the innermost range around each interval, as its row or -1; int64 (n,).

        A range holds [begin, end] where it begins not later and ends not earlier, as in NVIDIA's
        nvtx_kern_sum.
        """
        result = np.full(len(begin), -1, np.int64)
        for key, (rows, starts) in self._threads.items():
            requested = np.flatnonzero((process == key[0]) & (thread == key[1]))
            if not len(requested):
                continue
            position = np.searchsorted(starts, begin[requested], side="right") - 1
            inner = np.where(position >= 0, rows[position], -1)
            stop = end[requested]
            while (over := (inner >= 0) & (self._ends[inner] < stop)).any():
                inner[over] = self.parent[inner[over]]
            result[requested] = inner
        return result
