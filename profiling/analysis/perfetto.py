"""Writes the capture, with what the analysis found, for https://ui.perfetto.dev.

Three kinds of tracks: the budget of each rank over time, its streams with the range and the rule
of every kernel, and the ranges of the host. Several ranks stand on one clock where their captures
say what time it was. Of a long capture it holds the first steps, up to `MOST` kernels of each rank:
the profiler's own file has the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np

from analysis import intervals
from analysis.attribution import RULES, Attribution
from analysis.budget import PARTS, Lane
from analysis.kineto import MARK
from analysis.summary import lane_labels
from analysis.table import Table
from analysis.verdict import NAMES

MOST = 50_000
_BUDGET_TRACK, _HOST_TRACK = 1, 2


def write(path: Path, table: Table, lanes: list[Lane], attribution: Attribution) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        _write(file, table, lanes, attribution)
    partial.replace(path)


def _write(file: TextIO, table: Table, lanes: list[Lane], attribution: Attribution) -> None:
    file.write(f'{{"producer": "{MARK}", "displayTimeUnit": "ms", "traceEvents": [\n')
    first = True
    for number, (lane, label) in enumerate(zip(lanes, lane_labels(table, lanes), strict=True)):
        shift = _shift(table, lanes, lane)
        for event in _events(number, lane, label, table, attribution, shift):
            file.write(event if first else ",\n" + event)
            first = False
    file.write("\n]}\n")


def _shift(table: Table, lanes: list[Lane], lane: Lane) -> int:
    """Return the offset of a lane's times that makes all lanes begin near 0."""
    epochs = [table.processes[each.process].epoch for each in lanes]
    begins = [int(each.steps.windows[0, 0]) for each in lanes]
    if all(epochs):
        origin = min(begin + epoch for begin, epoch in zip(begins, epochs, strict=True))
        return table.processes[lane.process].epoch - origin
    return -int(lane.steps.windows[0, 0])


def _events(
    number: int, lane: Lane, label: str, table: Table, attribution: Attribution, shift: int
) -> Iterator[str]:
    names = [json.dumps(name) for name in table.names]
    paths = [json.dumps(path) for path in attribution.paths]
    rules = [json.dumps(rule) for rule in RULES]
    begin, end = _span(table, lane)
    yield _meta(number, 0, "process_name", label)
    yield _meta(number, _BUDGET_TRACK, "thread_name", "budget")
    for part in PARTS:
        name = json.dumps(NAMES[part])
        for first, last in intervals.clip(lane.moments[part], begin, end).tolist():
            yield _slice(number, _BUDGET_TRACK, name, first + shift, last - first)
    ranges = table.ranges[(table.ranges["process"] == lane.process) & ~table.ranges["is_op"]]
    ranges = ranges[(ranges["end"] > begin) & (ranges["start"] < end)]
    threads = {thread: _HOST_TRACK + n for n, thread in enumerate(_distinct(ranges["thread"]))}
    for track in threads.values():
        yield _meta(number, track, "thread_name", "host" if track == 2 else f"host {track - 1}")
    for first, last, thread, name in ranges[["start", "end", "thread", "name"]].tolist():
        yield _slice(number, threads[thread], names[name], first + shift, last - first)
    work = table.work[lane.rows]
    chosen = np.flatnonzero((work["end"] > begin) & (work["start"] < end))
    work, rows = work[chosen], lane.rows[chosen]
    tracks = {stream: 1000 + n for n, stream in enumerate(_distinct(work["stream"]))}
    kind = "stream" if table.has_gpu else "operators of thread"
    for stream, track in tracks.items():
        yield _meta(number, track, "thread_name", f"{kind} {stream & 0xFFFFFF}")
    labels = zip(
        work[["start", "end", "stream", "name"]].tolist(),
        attribution.path[rows].tolist(),
        attribution.phase[rows].tolist(),
        attribution.rule[rows].tolist(),
        strict=True,
    )
    for (first, last, stream, name), path, phase, rule in labels:
        more = f'"range":{paths[path]},"phase":{paths[phase]},"attributed by":{rules[rule]}'
        yield _slice(number, tracks[stream], names[name], first + shift, last - first, more)


def _span(table: Table, lane: Lane) -> tuple[int, int]:
    """Return the time from the first written step to the last, ns."""
    windows = lane.steps.windows
    begins = np.sort(table.work["start"][lane.rows])
    before = np.searchsorted(begins, windows[:, 1]) - np.searchsorted(begins, windows[0, 0])
    last = max(int(np.searchsorted(before, MOST, side="right")) - 1, 0)
    return int(windows[0, 0]), int(windows[last, 1])


def _distinct(values: np.ndarray) -> list[int]:
    return sorted(set(values.tolist()))


def _meta(process: int, thread: int, what: str, name: str) -> str:
    event = {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}
    return json.dumps(event)


def _slice(
    process: int, thread: int, name: str, start: int, duration: int, arguments: str = ""
) -> str:
    return (
        f'{{"ph":"X","pid":{process},"tid":{thread},"name":{name},"ts":{start / 1e3:.3f},'
        f'"dur":{duration / 1e3:.3f},"args":{{{arguments}}}}}'
    )
