"""One table of what host and device did, whichever profiler saw it. Times are ns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np


class Kind(IntEnum):
    """Kind of a row of work."""

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
    """One process that was profiled.

    Attributes:
        source: Name of the file.
        pid: Pid of the process.
        rank: Rank in the run, if known.
        epoch: Offset from its times to ns since 1970; 0 if unknown.
    """

    source: str
    pid: int
    rank: int | None = None
    epoch: int = 0

    @property
    def label(self) -> str:
        """Name of the process in the report."""
        return f"process {self.pid}" if self.rank is None else f"rank {self.rank}"


@dataclass(slots=True)
class Note:
    """A remark about the reliability of the figures: ``level`` is ok, note or warning."""

    level: str
    text: str


@dataclass(slots=True)
class Table:
    """Records of the profilers.

    Attributes:
        names: Names of kernels, calls and ranges: columns ``name`` point here.
        processes: Columns ``process`` point here.
        work: Rows of `WORK`.
        launches: Rows of `LAUNCH`: calls of the CUDA runtime and driver.
        ranges: Rows of `RANGE`: annotations and operators.
        overhead: int64 (n, 3): process, begin and end of the profiler's own activity.
        notes: Notes on the quality of the capture.
        facts: Facts about the capture by name.
    """

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
        """Whether any work ran on a GPU."""
        return bool((self.work["kind"] != Kind.OPERATOR).any())


class Names:
    """Numbers names in the order in which they come."""

    def __init__(self) -> None:
        self.list: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the number of a name."""
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
