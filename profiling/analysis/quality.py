"""Rates how reliable the figures are: data that the capture lacks, and the profiler's cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis import intervals
from analysis.attribution import Launches
from analysis.budget import Lane
from analysis.readers.table import Kind, Note, Table
from analysis.verdict import percent

_FEW_STEPS = 3
_SPREAD = 1.5
_UNATTRIBUTED = 0.05


def assess(
    table: Table,
    launches: Launches,
    lanes: list[Lane],
    rules: dict[str, float],
    log: dict[str, Any],
) -> list[Note]:
    """Everything to know before using the figures, most serious first."""
    notes = [
        *table.notes,
        *_steps(table, lanes),
        *_launches(table, launches, lanes),
        *_rules(table, rules),
        *_graphs(table),
        *_overhead(table, lanes),
        *_against_log(lanes, log),
    ]
    order = {"warning": 0, "note": 1, "ok": 2}
    unique = {(note.level, note.text): note for note in notes}
    return sorted(unique.values(), key=lambda note: order[note.level])


def _steps(table: Table, lanes: list[Lane]) -> list[Note]:
    notes = []
    for source in dict.fromkeys(
        table.processes[lane.process].source for lane in lanes if not lane.steps.is_found
    ):
        notes.append(
            Note(
                "warning",
                f"{source} has no ranges that mark steps: the whole capture counts as one step "
                "(--step-range NAME says which ranges do)",
            )
        )
    counts = {len(lane.steps.windows) for lane in lanes if lane.steps.is_found}
    if counts:
        least, most = min(counts), max(counts)
        text = f"{least} steps" if least == most else f"{least} to {most} steps"
        level = "note" if least < _FEW_STEPS else "ok"
        more = f": fewer than {_FEW_STEPS} say little about the spread" if level == "note" else ""
        notes.append(Note(level, f"{text} of {_count(len(lanes), 'rank')}{more}"))
    walls = np.concatenate([lane.wall for lane in lanes]) if lanes else np.zeros(0)
    if len(walls) > 1 and walls.max() > _SPREAD * np.median(walls):
        notes.append(
            Note(
                "note",
                f"the longest step takes {walls.max() / np.median(walls):.1f} times the median: "
                "--skip N leaves the first N out, if they warm up",
            )
        )
    return notes


def _launches(table: Table, launches: Launches, lanes: list[Lane]) -> list[Note]:
    if not table.has_gpu:
        return []
    rows = np.concatenate([lane.rows for lane in lanes]) if lanes else np.zeros(0, np.int64)
    lost = rows[~launches.is_known[rows]]
    work = table.work["end"] - table.work["start"]
    total = int(work[rows].sum())
    if not len(lost) or not total:
        return [Note("ok", "every kernel and copy has its launch")]
    share = int(work[lost].sum()) / total
    return [
        Note(
            "warning" if share > _UNATTRIBUTED else "note",
            f"{len(lost)} of {len(rows)} kernels and copies, {percent(share)} of their time, have "
            "no record of their launch: it lies outside the capture",
        )
    ]


def _rules(table: Table, rules: dict[str, float]) -> list[Note]:
    if not table.has_gpu and not len(table.work):
        return []
    said = {
        "launch": "by the range around the launch",
        "forward": "to the forward range of a backward operator",
        "time": "by the range open on the main thread at the time",
        "external id": "by the operator that the trace names",
        "operator": "to an operator only, no range being open",
        "none": "to nothing",
    }
    shares = [f"{percent(rules[rule])} {text}" for rule, text in said.items() if rules.get(rule)]
    lost = rules.get("none", 0.0)
    level = "warning" if lost > _UNATTRIBUTED else "ok"
    return [Note(level, f"work attributed: {', '.join(shares)}")] if shares else []


def _graphs(table: Table) -> list[Note]:
    gpu = table.work["kind"] == Kind.KERNEL
    in_graph = gpu & (table.work["graph_node"] > 0)
    if not in_graph.any():
        return []
    work = table.work["end"] - table.work["start"]
    share = int(work[in_graph].sum()) / max(int(work[gpu].sum()), 1)
    return [
        Note(
            "note",
            f"{percent(share)} of the kernels' time is in CUDA graphs, where ranges are not "
            "replayed: their kernels count for the range that launched the graph",
        )
    ]


def _overhead(table: Table, lanes: list[Lane]) -> list[Note]:
    spent = wall = 0
    for process in {lane.process for lane in lanes}:
        windows = next(lane.steps.windows for lane in lanes if lane.process == process)
        own = table.overhead[table.overhead[:, 0] == process]
        moments = intervals.union(own[:, 1], own[:, 2])
        spent += intervals.measure(intervals.intersect(moments, windows))
        wall += intervals.measure(windows)
    if not spent or not wall:
        return []
    share = spent / wall
    return [
        Note(
            "warning" if share > _UNATTRIBUTED else "ok",
            f"the profiler itself was at work during {percent(share)} of the steps",
        )
    ]


def _against_log(lanes: list[Lane], log: dict[str, Any]) -> list[Note]:
    if "step_s" not in log or not any(lane.steps.is_found for lane in lanes):
        return []
    profiled = float(np.median(np.concatenate([lane.wall for lane in lanes]))) / 1e9
    usual = log["step_s"]["median"]
    if usual <= 0:
        return []
    ratio = profiled / usual
    level = "warning" if ratio > 1.1 else "ok"
    return [
        Note(
            level,
            f"a profiled step takes {ratio:.2f} times the run's median step ({profiled * 1e3:.1f} "
            f"against {usual * 1e3:.1f} ms)",
        )
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
