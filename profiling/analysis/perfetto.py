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

import numpy as np

from analysis import intervals
from analysis.attribution import RULES, Attribution
from analysis.budget import PARTS, Lane
from analysis.kineto import MARK
from analysis.summary import lane_labels
from analysis.table import Table
from analysis.verdict import NAMES

MOST = 50_000
_BUDGET_TRACK, _HOST_TRACK, _FIRST_STREAM = 1, 2, 1000


def write(path: Path, table: Table, lanes: list[Lane], attribution: Attribution) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(f'{{"producer": "{MARK}", "displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(map(json.dumps, _events(table, lanes, attribution))))
        file.write("\n]}\n")
    partial.replace(path)


def _events(
    table: Table, lanes: list[Lane], attribution: Attribution
) -> Iterator[dict[str, object]]:
    epochs = [table.processes[lane.process].epoch for lane in lanes]
    begins = [int(lane.steps.windows[0, 0]) for lane in lanes]
    origin = min(begin + epoch for begin, epoch in zip(begins, epochs, strict=True))
    for number, label in enumerate(lane_labels(table, lanes)):
        # All lanes begin near 0.
        shift = epochs[number] - origin if all(epochs) else -begins[number]
        for track, name, times, arguments in _tracks(table, lanes[number], label, attribution):
            event = {"ph": "X" if times else "M", "pid": number, "tid": track, "name": name}
            if times:
                begin, end = times
                event |= {"ts": round((begin + shift) / 1e3, 3), "dur": (end - begin) / 1e3}
            yield event | {"args": arguments}


def _tracks(table: Table, lane: Lane, label: str, attribution: Attribution) -> Iterator[tuple]:
    """Yield track, name, begin and end, and arguments of events; names of tracks have no time."""
    begin, end = _span(table, lane)
    named = lambda track, name: (track, "thread_name", None, {"name": name})
    yield 0, "process_name", None, {"name": label}
    yield named(_BUDGET_TRACK, "budget")
    for part in PARTS:
        for times in intervals.clip(lane.moments[part], begin, end).tolist():
            yield _BUDGET_TRACK, NAMES[part], times, {}
    ranges = table.ranges[table.annotations(lane.process)]
    ranges = ranges[(ranges["end"] > begin) & (ranges["start"] < end)]
    for number, thread in enumerate(np.unique(ranges["thread"])):
        track = _HOST_TRACK + number
        yield named(track, f"host {track - 1}" if number else "host")
        chosen = ranges[ranges["thread"] == thread]
        for first, last, name in chosen[["start", "end", "name"]].tolist():
            yield track, table.names[name], (first, last), {}
    rows = lane.rows
    rows = rows[(table.work["end"][rows] > begin) & (table.work["start"][rows] < end)]
    kind = "stream" if table.has_gpu else "operators of thread"
    for number, stream in enumerate(np.unique(table.work["stream"][rows]).tolist()):
        track = _FIRST_STREAM + number
        yield named(track, f"{kind} {stream & 0xFFFFFF}")
        chosen = rows[table.work["stream"][rows] == stream]
        work = table.work[["start", "end", "name"]][chosen].tolist()
        for row, (first, last, name) in zip(chosen.tolist(), work, strict=True):
            yield (
                *(track, table.names[name], (first, last)),
                {
                    "range": attribution.paths[attribution.path[row]],
                    "phase": attribution.paths[attribution.phase[row]],
                    "attributed by": RULES[attribution.rule[row]],
                },
            )


def _span(table: Table, lane: Lane) -> tuple[int, int]:
    """Return the time from the first written step to the last, ns."""
    windows = lane.steps.windows
    begins = np.sort(table.work["start"][lane.rows])
    before = np.searchsorted(begins, windows[:, 1]) - np.searchsorted(begins, windows[0, 0])
    last = max(int(np.searchsorted(before, MOST, side="right")) - 1, 0)
    return int(windows[0, 0]), int(windows[last, 1])
