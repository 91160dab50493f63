"""The whole analysis of one subject: the mapping that becomes report.json and the page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from analysis import attribution as labels
from analysis import figures, quality, ranks, steps, timeline, verdict
from analysis.attribution import Attribution
from analysis.budget import IDLE, PARTS, Lane, classes
from analysis.budget import lanes as find_lanes
from analysis.categories import CATEGORIES, PATTERNS, categorize
from analysis.readers import run_log
from analysis.readers.sources import Subject
from analysis.readers.table import Note, Table


@dataclass(frozen=True, slots=True)
class Analysis:
    """Results of the analysis of a subject.

    Attributes:
        report: Content of report.json.
        table: The capture.
        lanes: The budgets of its devices.
        attribution: Attribution of its work.
    """

    report: dict[str, Any]
    table: Table
    lanes: list[Lane]
    attribution: Attribution


def analyze(subject: Subject, *, step_range: str | None = None, skip: int = 0) -> Analysis:
    """Analyse captures and logs of one run.

    Args:
        subject: Subject of the analysis.
        step_range: Name of the ranges that mark steps; None to find them by their names.
        skip: Number of first steps to leave out on every rank.

    Raises:
        ValueError: A capture is damaged, or has no such ranges.
    """
    table = subject.table()
    if step_range is not None and step_range not in table.names:
        raise ValueError(
            f"`step_range` must be the name of a range of the capture, but is {step_range!r}."
        )
    launches = labels.find_launches(table)
    working = sorted(set(table.work["process"].tolist()))
    found = {
        process: steps.find(table, process, launches.begin, name=step_range, skip=skip)
        for process in working
    }
    attribution = labels.attribute(table, launches, found)
    categories = [categorize(name) for name in table.names]
    part = classes(table, categories)
    lanes = find_lanes(table, launches, found, attribution, part)
    report = _of_log(subject, table)
    rules: dict[str, float] = {}
    if lanes:
        place = {name: number for number, name in enumerate(CATEGORIES)}
        of_name = np.array([place[name] for name in categories], np.int64)
        rules = _add_work(report, table, lanes, attribution, of_name[table.work["name"]], part,
                          categories)  # fmt: skip
    notes = subject.notes + quality.assess(table, launches, lanes, rules, report["log"])
    if not subject.captures:
        notes.append(Note("note", "no capture was given: there is nothing on kernels"))
    report["attribution"] = rules
    report["quality"] = [asdict(note) for note in notes]
    report["actions"] = verdict.actions(report)
    report["verdict"] = verdict.sentence(report)
    report["patterns"] = PATTERNS
    return Analysis(report, table, lanes, attribution)


def _of_log(subject: Subject, table: Table) -> dict[str, Any]:
    """Return a report with what is known without the work of the capture."""
    padding = run_log.padding(subject.metrics)
    return {
        "name": subject.name,
        "facts": table.facts,
        "sources": [path.name for path in subject.captures],
        "log": run_log.summarize(subject.metrics),
        "padding": padding,
        "waterfall": run_log.waterfall(subject.metrics, padding),
        "budget": None,
        "categories": [],
        "ranks": {},
    }


def _add_work(
    report: dict[str, Any],
    table: Table,
    lanes: list[Lane],
    attribution: Attribution,
    category: np.ndarray,
    part: np.ndarray,
    categories: list[str],
) -> dict[str, float]:
    """Fill in everything that comes from the capture; returns the shares of the rules."""
    pieces = [figures.cut(table, lane, part) for lane in lanes]
    count = sum(len(lane.steps.windows) for lane in lanes)
    report["budget"] = _budget(table, lanes)
    report["categories"] = figures.by_category(category, CATEGORIES, part, pieces, count)
    report["phases"] = figures.by_phase(table, pieces, attribution, category, CATEGORIES, count)
    report["ranges"] = figures.by_range(pieces, attribution, count)
    report["kernels"] = figures.kernels(table, pieces, categories, count)
    report["ranks"] = ranks.summarize(table, lanes)
    report["timeline"] = timeline.picture(table, _shown(lanes), attribution, category)
    return figures.by_rule(pieces, attribution)


def _shown(lanes: list[Lane]) -> Lane:
    """Return the lane with most time of its own: the slowest rank."""
    own = [float((lane.wall - lane.parts["communication"]).mean()) for lane in lanes]
    return lanes[int(np.argmax(own))]


def _budget(table: Table, lanes: list[Lane]) -> dict[str, Any]:
    """Return the budget of all ranks together, and of each."""
    walls = np.concatenate([lane.wall for lane in lanes])
    total, count = int(walls.sum()), len(walls)
    sums = {name: sum(int(lane.parts[name].sum()) for lane in lanes) for name in PARTS}
    idle = {name: sum(int(lane.idle[name].sum()) for lane in lanes) for name in IDLE}
    hidden = sum(int(lane.hidden.sum()) for lane in lanes)
    # Exact by construction; a report whose parts do not add up would be worse than none.
    if sum(sums.values()) != total or sum(idle.values()) != sums["idle"]:
        raise RuntimeError(f"the parts {sums} and {idle} do not add up to {total} ns")
    entry = lambda name, value: {
        "name": name,
        "ns": value,
        "ms": value / 1e6 / count,
        "share": value / total,
    }
    return {
        "has_gpu": table.has_gpu,
        "is_stepwise": all(lane.steps.is_found for lane in lanes),
        "ranks": len(lanes),
        "steps": max(len(lane.steps.windows) for lane in lanes),
        "windows": count,
        "wall_ns": total,
        "step_ms": {
            "mean": total / 1e6 / count,
            "median": float(np.median(walls)) / 1e6,
            "min": int(walls.min()) / 1e6,
            "max": int(walls.max()) / 1e6,
        },
        "parts": [entry(name, value) for name, value in sums.items()],
        "idle": [entry(name, value) for name, value in idle.items()],
        "hidden_communication": entry("hidden_communication", hidden),
        "per_rank": [
            {
                "name": label,
                "steps": len(lane.steps.windows),
                "step_ms": float(lane.wall.mean()) / 1e6,
                "parts_ms": {name: float(lane.parts[name].mean()) / 1e6 for name in PARTS},
            }
            for label, lane in zip(ranks.lane_labels(table, lanes), lanes, strict=True)
        ],
        "per_step": [
            {
                "step": int(number),
                "ms": float(lanes[0].wall[index]) / 1e6,
                "parts_ms": {n: float(lanes[0].parts[n][index]) / 1e6 for n in PARTS},
            }
            for index, number in enumerate(lanes[0].steps.numbers)
        ],
    }
