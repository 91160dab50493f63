"""Splits the time of the steps into parts that add up to it exactly.

Each moment of a step belongs to the first of these that holds:

    compute         a kernel runs that is no communication
    communication   only communication runs: it is exposed, nothing hides it
    copies          only copies and fills of memory run
    data wait       the GPU has nothing to do, and the host waits for a batch
    host gap        the GPU has nothing to do, and the next work has not been launched: the host is
                    in the step, in Python, in operators, in the launch itself
    idle            the GPU has nothing to do for another reason: `queued` work that was launched
                    but not begun (latency, a dependency), the host blocked in a `synchronizing`
                    call, or `outside` of every range

Only unions of intervals are measured: kernels on several streams at once are not added up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from analysis import intervals
from analysis.attribution import Attribution, Launches
from analysis.categories import COMMUNICATION
from analysis.readers.table import NONE, Kind, Table
from analysis.steps import DATA, Steps

PARTS = ("compute", "communication", "copies", "data_wait", "host_gap", "idle")
IDLE = ("queued", "synchronizing", "outside")
_SYNCHRONIZE = re.compile(r"Synchronize", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Lane:
    """One device of one process, which is a rank of the run, or a process without a GPU.

    Attributes:
        process: Number of the process.
        device: Number of the device; NONE without a GPU.
        steps: Steps of the process.
        rows: Rows of work of the lane.
        parts: Time of each part by name, ns in each step, int64 (steps,).
        idle: Time of the components of `idle`, in the same form.
        hidden: ns of communication under compute, in each step.
        moments: Set of the moments of each part by name, for the picture.
    """

    process: int
    device: int
    steps: Steps
    rows: np.ndarray
    parts: dict[str, np.ndarray]
    idle: dict[str, np.ndarray]
    hidden: np.ndarray
    moments: dict[str, np.ndarray]

    @property
    def wall(self) -> np.ndarray:
        """Ns of each step."""
        return self.steps.windows[:, 1] - self.steps.windows[:, 0]


def classes(table: Table, categories: list[str]) -> np.ndarray:
    """Return the part that each row of work belongs to while it runs: a number into `PARTS`."""
    is_communication = np.array([name == COMMUNICATION for name in categories] or [False])
    kind = table.work["kind"]
    part = np.zeros(len(kind), np.int64)
    part[(kind == Kind.COPY) | (kind == Kind.FILL)] = PARTS.index("copies")
    part[is_communication[table.work["name"]]] = PARTS.index("communication")
    return part


def lanes(
    table: Table,
    launches: Launches,
    steps: dict[int, Steps],
    attribution: Attribution,
    part: np.ndarray,
) -> list[Lane]:
    """Return the budget of every device of every process that works.

    Args:
        table: The capture.
        launches: Launches of its work.
        steps: Steps of each process.
        attribution: Attribution of its work.
        part: Part of each row of work, from `classes`.
    """
    work = table.work
    keys = sorted(
        set(zip(work["process"].tolist(), work["device"].tolist(), strict=True)),
        key=lambda key: (_order(table, key[0]), *key),
    )
    found = []
    for process, device in keys:
        rows = np.flatnonzero((work["process"] == process) & (work["device"] == device))
        found.append(
            _lane(table, launches, steps[process], attribution, part, rows, process, device)
        )
    return [lane for lane in found if len(lane.steps.windows)]


def _order(table: Table, process: int) -> tuple[bool, int]:
    rank = table.processes[process].rank
    return rank is None, rank or 0


def _lane(
    table: Table,
    launches: Launches,
    steps: Steps,
    attribution: Attribution,
    part: np.ndarray,
    rows: np.ndarray,
    process: int,
    device: int,
) -> Lane:
    work, windows = table.work[rows], steps.windows
    host = _Host(table, process, steps)
    counted = np.ones(len(rows), bool)
    if device == NONE:
        # Without a GPU, what runs to make a batch is part of waiting for it.
        is_data = np.array([DATA.match(text) is not None for text in attribution.paths])
        counted = ~is_data[attribution.phase[rows]]
    running = [
        intervals.intersect(intervals.union(work["start"][chosen], work["end"][chosen]), windows)
        for chosen in (counted & (part[rows] == number) for number in range(3))
    ]
    busy = running[0]
    moments = {"compute": busy}
    for name, own in zip(PARTS[1:3], running[1:], strict=True):
        moments[name] = intervals.subtract(own, busy)
        busy = intervals.join(busy, own)
    nothing = intervals.subtract(windows, busy)
    queued = _queued(nothing, work[counted], launches, rows[counted])
    rest = intervals.subtract(nothing, queued)
    moments["data_wait"] = intervals.intersect(rest, host.data)
    rest = intervals.subtract(rest, host.data)
    synchronizing = intervals.intersect(rest, host.blocked)
    rest = intervals.subtract(rest, host.blocked)
    moments["host_gap"] = intervals.intersect(rest, host.inside)
    outside = intervals.subtract(rest, host.inside)
    reasons = dict(zip(IDLE, (queued, synchronizing, outside), strict=True))
    moments["idle"] = intervals.join(*reasons.values())
    each = lambda moments: intervals.covered(moments, windows[:, 0], windows[:, 1])
    return Lane(
        process,
        device,
        steps,
        rows,
        {name: each(moments[name]) for name in PARTS},
        {name: each(moments) for name, moments in reasons.items()},
        each(intervals.intersect(running[0], running[1])),
        moments,
    )


class _Host:
    """Return sets of host states: waiting for data, blocked, inside of any range."""

    def __init__(self, table: Table, process: int, steps: Steps) -> None:
        ranges = table.ranges[(table.ranges["process"] == process) & ~table.ranges["is_op"]]
        if steps.is_found:
            ranges = ranges[ranges["thread"] == steps.thread]
        is_data = np.array([DATA.match(text) is not None for text in table.names], bool)
        spans = lambda rows: intervals.union(rows["start"], rows["end"])
        self.data = spans(ranges[is_data[ranges["name"]]]) if len(ranges) else intervals.EMPTY
        calls = table.launches[table.launches["process"] == process]
        blocks = np.array([_SYNCHRONIZE.search(text) is not None for text in table.names], bool)
        blocked = calls[blocks[calls["name"]]] if len(calls) else calls
        if steps.is_found:
            blocked = blocked[blocked["thread"] == steps.thread]
        self.blocked = spans(blocked)
        # A capture without ranges of steps is one: the host is inside while it goes on.
        self.inside = intervals.join(steps.host, spans(ranges))


def _queued(
    nothing: np.ndarray, work: np.ndarray, launches: Launches, rows: np.ndarray
) -> np.ndarray:
    """Return the moments of ``nothing`` after the launch of the work that comes next, a set."""
    if not len(nothing) or not len(work):
        return intervals.EMPTY
    order = np.lexsort((launches.end[rows], work["start"]))
    starts = work["start"][order]
    launched = np.where(launches.is_known[rows], launches.end[rows], work["start"])[order]
    following = np.searchsorted(starts, nothing[:, 0])
    is_last = following == len(starts)
    launch = launched[np.minimum(following, len(starts) - 1)]
    begin = np.where(is_last, nothing[:, 1], np.clip(launch, nothing[:, 0], nothing[:, 1]))
    return intervals.union(begin, nothing[:, 1])
