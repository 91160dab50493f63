"""When each step begins and ends.

A host queues work and goes on; a step is over when the host has left it *and* the work that it
queued is done. Windows therefore end with their work, and the next begins there: they lie end to
end, and every moment of a step belongs to one. The time between two ranges belongs to the later
step (its batch is fetched there), except validation, checkpoints and long interruptions.
"""

import re
from dataclasses import dataclass

import numpy as np

from analysis import intervals
from analysis.table import NONE, Note, Table, busiest_thread, outermost

STEP = re.compile(
    r"^(ProfilerStep#\d+|(train(ing)?[ _]?)?(step|iteration|iter|train_batch)(?![a-z]))", re.I
)
DATA = re.compile(r"^(data|data[ _]?(wait|load\w*)|fetch|next_batch|enumerate\(DataLoader\))", re.I)
_NO_STEP = re.compile(r"^(validat|evaluat|checkpoint|save)", re.I)
PROFILER_STEP = re.compile("ProfilerStep#")
_INTERRUPTION = 10  # a pause as long as so many steps is not part of one


@dataclass(frozen=True, slots=True)
class Steps:
    windows: np.ndarray
    numbers: np.ndarray
    host: np.ndarray
    containers: np.ndarray
    thread: int
    is_found: bool


def find(
    table: Table,
    process: int,
    launched: np.ndarray,
    *,
    name: str | None = None,
    skip: int = 0,
) -> Steps:
    containers, thread = _containers(table, process, name)
    is_own = table.work["process"] == process
    launch_times, done = launched[is_own], table.work["end"][is_own]
    if not len(containers):
        return _whole(table, process, launch_times, done)
    begins = table.ranges["start"][containers]
    ends = table.ranges["end"][containers]
    pauses = _pauses(table, process, thread, begins, ends)
    begins = begins.copy()
    begins[0] = _with_data(table, process, thread, int(begins[0]), int(np.median(ends - begins)))
    windows = _windows(begins, ends, pauses, _Finish(launch_times, done))
    numbers = _numbers(table, containers)
    is_kept = (windows[:, 1] > windows[:, 0]) & (np.arange(len(windows)) >= skip)
    if skip and not is_kept.any():
        raise ValueError(
            f"`skip` must leave a step, but is {skip} and {table.processes[process].source} holds "
            f"{len(windows)}: skip fewer, or capture more."
        )
    host = intervals.union(begins, ends)
    return Steps(windows[is_kept], numbers[is_kept], host, containers, thread, True)


def _windows(
    begins: np.ndarray, ends: np.ndarray, pauses: np.ndarray, finish: "_Finish"
) -> np.ndarray:
    """Return begin and end of the steps, int64 (n, 2); steps that the next overtakes are empty."""
    windows = []
    previous = finish.of(None, int(begins[0]))
    exited = None
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        start = begin
        if exited is not None:
            pause = intervals.clip(pauses, exited, begin)
            start = int(pause[-1, 1]) if len(pause) else exited
            previous = max(previous, finish.of(exited, start))
        start = max(start, previous)
        previous = max(end, start, finish.of(begin if exited is None else exited, end))
        windows.append((start, previous))
        exited = end
    return np.array(windows, np.int64)


def _containers(table: Table, process: int, name: str | None) -> tuple[np.ndarray, int]:
    """Return the outermost step ranges, in order, on the thread that has most of them."""
    ranges = table.ranges
    pattern = STEP if name is None else re.compile(rf"{re.escape(name)}\Z")
    rows = table.annotations(process, pattern=pattern)
    # The profiler's own marks count from its first step; those of the program know better.
    is_own = ~table.matches(PROFILER_STEP)[ranges["name"][rows]]
    rows = rows[is_own] if is_own.any() else rows
    thread = busiest_thread(ranges[rows])
    return outermost(ranges, rows[ranges["thread"][rows] == thread]), thread


def _with_data(table: Table, process: int, thread: int, begin: int, length: int) -> int:
    """Return the begin of the first step, or of the adjacent range that fetched its batch."""
    rows = table.ranges[table.annotations(process, thread, DATA)]
    rows = rows[(rows["end"] <= begin) & (rows["end"] >= begin - length)]
    return int(rows["start"].max()) if len(rows) else begin


def _pauses(
    table: Table, process: int, thread: int, begins: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    ranges = table.ranges[table.annotations(process, thread, _NO_STEP)]
    pauses = [intervals.union(ranges["start"], ranges["end"])]
    limit = _INTERRUPTION * int(np.median(ends - begins))
    long = np.flatnonzero(begins[1:] - ends[:-1] > limit)
    if len(long):
        source = table.processes[process].source
        seconds = int((begins[1:] - ends[:-1])[long].sum()) / 1e9
        table.notes.append(
            Note(
                "note",
                f"{source}: {len(long)} interruptions between steps, {seconds:.1f} s together, "
                "are not counted",
            )
        )
        pauses.append(intervals.union(ends[:-1][long], begins[1:][long]))
    return intervals.join(*pauses)


class _Finish:
    def __init__(self, asked: np.ndarray, done: np.ndarray) -> None:
        order = np.argsort(asked, kind="stable")
        self.asked, self.done = asked[order], done[order]

    def of(self, begin: int | None, end: int) -> int:
        """Return when work launched in [begin, end) ends, ns; the int64 minimum without any."""
        first = 0 if begin is None else int(np.searchsorted(self.asked, begin))
        last = int(np.searchsorted(self.asked, end))
        return int(self.done[first:last].max()) if last > first else np.iinfo(np.int64).min


def _whole(table: Table, process: int, launch_times: np.ndarray, done: np.ndarray) -> Steps:
    launches = table.launches[table.launches["process"] == process]
    begins = [launch_times, launches["start"]]
    ends = [done, launches["end"]]
    if not sum(map(len, begins)):
        ranges = table.ranges[table.ranges["process"] == process]
        begins, ends = [ranges["start"]], [ranges["end"]]
    begin, end = np.concatenate(begins), np.concatenate(ends)
    window = intervals.EMPTY
    if len(begin) and end.max() > begin.min():
        window = np.array([[begin.min(), end.max()]], np.int64)
    nothing = np.zeros(0, np.int64)
    return Steps(window, np.zeros(len(window), np.int64), window, nothing, NONE, False)


def _numbers(table: Table, containers: np.ndarray) -> np.ndarray:
    payloads = table.ranges["payload"][containers]
    if (payloads != NONE).all() and len(np.unique(payloads)) == len(payloads):
        return payloads
    texts = [table.names[name] for name in table.ranges["name"][containers]]
    written = [re.search(r"\d+", text) for text in texts]
    if all(written):
        numbers = np.array([int(match[0]) for match in written if match], np.int64)
        if len(np.unique(numbers)) == len(numbers):
            return numbers
    return np.arange(len(containers), dtype=np.int64)
