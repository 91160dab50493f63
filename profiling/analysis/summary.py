"""The whole analysis of one subject: the mapping that becomes report.json and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from analysis import attribution as labels
from analysis import intervals, sources, steps, verdict
from analysis.attribution import RULES, Attribution
from analysis.budget import CATEGORIES, IDLE, PARTS, PATTERNS, Lane, categorize, classes, shorten
from analysis.budget import lanes as find_lanes
from analysis.sources import Subject
from analysis.table import Kind, Note, Table


@dataclass(frozen=True, slots=True)
class Analysis:
    report: dict[str, Any]
    table: Table
    lanes: list[Lane]
    attribution: Attribution


def analyze(subject: Subject, *, step_range: str | None = None, skip: int = 0) -> Analysis:
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
    notes = subject.notes + verdict.assess(table, launches, lanes, rules, report["log"])
    if not subject.captures:
        notes.append(Note("note", "no capture was given: there is nothing on kernels"))
    report["attribution"] = rules
    report["quality"] = [asdict(note) for note in notes]
    report["actions"] = verdict.actions(report)
    report["verdict"] = verdict.sentence(report)
    report["patterns"] = PATTERNS
    return Analysis(report, table, lanes, attribution)


def _of_log(subject: Subject, table: Table) -> dict[str, Any]:
    padding = sources.padding(subject.metrics)
    return {
        "name": subject.name,
        "facts": table.facts,
        "sources": [path.name for path in subject.captures],
        "log": sources.summarize_log(subject.metrics),
        "padding": padding,
        "waterfall": sources.waterfall(subject.metrics, padding),
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
    pieces = [cut(table, lane, part) for lane in lanes]
    count = sum(len(lane.steps.windows) for lane in lanes)
    report["budget"] = _budget(table, lanes)
    report["categories"] = by_category(category, CATEGORIES, part, pieces, count)
    report["phases"] = by_phase(table, pieces, attribution, category, CATEGORIES, count)
    report["ranges"] = by_range(pieces, attribution, count)
    report["kernels"] = kernels(table, pieces, categories, count)
    report["ranks"] = summarize(table, lanes)
    report["timeline"] = picture(table, _shown(lanes), attribution, category)
    return by_rule(pieces, attribution)


def _shown(lanes: list[Lane]) -> Lane:
    """Return the lane with most time of its own: the slowest rank."""
    own = [float((lane.wall - lane.parts["communication"]).mean()) for lane in lanes]
    return lanes[int(np.argmax(own))]


def _budget(table: Table, lanes: list[Lane]) -> dict[str, Any]:
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
            for label, lane in zip(lane_labels(table, lanes), lanes, strict=True)
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


# Tables of work inside the steps: by kernel, category, phase and range.
#
# Each row has ``work``, the sum of durations, which may exceed the time of the steps where streams
# overlap, and ``wall``, the time it adds to the union: wall adds up to the busy time exactly.


@dataclass(frozen=True, slots=True)
class Pieces:
    """Work cut at the edges of steps: each piece lies in one step."""

    row: np.ndarray
    step: np.ndarray
    work: np.ndarray
    wall: np.ndarray


def cut(table: Table, lane: Lane, part: np.ndarray) -> Pieces:
    """Return the work of a lane inside its steps.

    Where work overlaps, compute counts first, then communication, then copies: as in the budget.
    """
    rows = lane.rows
    starts, ends = table.work["start"][rows], table.work["end"][rows]
    item, step, begin, end = intervals.split(starts, ends, lane.steps.windows)
    wall = np.zeros(len(item), np.int64)
    turns = _turns(table, rows)[item]
    shown = part[rows][item]
    for number, name in enumerate(PARTS[:3]):
        own = np.flatnonzero(shown == number)
        # In the order of begin, each moment counts for the first; what is hidden counts nowhere.
        wall[own] = intervals.increments(begin[own], end[own], turns[own], lane.moments[name])
    return Pieces(rows[item], step, end - begin, wall)


def _turns(table: Table, rows: np.ndarray) -> np.ndarray:
    """Return the place of each row's name in the alphabet: it decides between equal spans."""
    used, place = np.unique(table.work["name"][rows], return_inverse=True)
    texts = np.array([table.names[name] for name in used], object)
    ranks = np.empty(len(used), np.int64)
    ranks[np.argsort(texts, kind="stable")] = np.arange(len(used))
    return ranks[place] if len(used) else place


def by_category(
    category: np.ndarray, names: Sequence[str], part: np.ndarray, pieces: list[Pieces], steps: int
) -> list[dict[str, Any]]:
    """Work and wall time by category, most work first, per step and rank, ms."""
    labels, texts = category, names
    row = np.concatenate([piece.row for piece in pieces])
    work = np.concatenate([piece.work for piece in pieces])
    wall = np.concatenate([piece.wall for piece in pieces])
    sums = np.zeros((3, len(texts)), np.int64)
    np.add.at(sums[0], labels[row], work)
    np.add.at(sums[1], labels[row], wall)
    np.add.at(sums[2], labels[row], np.where(part[row] == 0, wall, 0))
    total = max(int(sums[0].sum()), 1)
    found = [
        {
            "name": texts[number],
            "work_ms": int(sums[0, number]) / 1e6 / steps,
            "wall_ms": int(sums[1, number]) / 1e6 / steps,
            "compute_ms": int(sums[2, number]) / 1e6 / steps,
            "share": int(sums[0, number]) / total,
        }
        for number in np.flatnonzero(sums[0]).tolist()
    ]
    return sorted(found, key=lambda entry: (-entry["work_ms"], entry["name"]))


def by_phase(
    table: Table,
    pieces: list[Pieces],
    attribution: Attribution,
    category: np.ndarray,
    categories: tuple[str, ...],
    steps: int,
) -> dict[str, Any]:
    """Work of each phase by category, per step and rank, ms."""
    row = np.concatenate([piece.row for piece in pieces])
    work = np.concatenate([piece.work for piece in pieces])
    sums = np.zeros((len(attribution.paths), len(categories)), np.int64)
    np.add.at(sums, (attribution.phase[row], category[row]), work)
    phases = [int(n) for n in np.flatnonzero(sums.sum(1))]
    phases.sort(key=lambda n: (-int(sums[n].sum()), attribution.paths[n]))
    used = np.flatnonzero(sums.sum(0))
    return {
        "phases": [attribution.paths[number] for number in phases],
        "categories": [categories[number] for number in used],
        "work_ms": [[int(sums[n, c]) / 1e6 / steps for c in used] for n in phases],
    }


def by_range(pieces: list[Pieces], attribution: Attribution, steps: int) -> list[dict[str, Any]]:
    """Work by the range that made it, of the forward and of the backward."""
    row = np.concatenate([piece.row for piece in pieces])
    work = np.concatenate([piece.work for piece in pieces])
    wall = np.concatenate([piece.wall for piece in pieces])
    sums = np.zeros((3, len(attribution.paths)), np.int64)
    back = attribution.is_backward[row].astype(np.int64)
    np.add.at(sums, (back, attribution.path[row]), work)
    np.add.at(sums[2], attribution.path[row], wall)
    total = max(int(sums[:2].sum()), 1)
    found = [
        {
            "name": attribution.paths[n],
            "forward_ms": int(sums[0, n]) / 1e6 / steps,
            "backward_ms": int(sums[1, n]) / 1e6 / steps,
            "wall_ms": int(sums[2, n]) / 1e6 / steps,
            "share": int(sums[:2, n].sum()) / total,
        }
        for n in np.flatnonzero(sums[:2].sum(0)).tolist()
    ]
    return sorted(found, key=lambda entry: (-entry["share"], entry["name"]))


def by_rule(pieces: list[Pieces], attribution: Attribution) -> dict[str, float]:
    """Return the share of the work that each rule attributed."""
    row = np.concatenate([piece.row for piece in pieces])
    work = np.concatenate([piece.work for piece in pieces])
    sums = np.zeros(len(RULES), np.int64)
    np.add.at(sums, attribution.rule[row], work)
    total = max(int(sums.sum()), 1)
    return {rule: int(sums[number]) / total for number, rule in enumerate(RULES)}


def kernels(
    table: Table, pieces: list[Pieces], categories: list[str], steps: int, most: int = 40
) -> dict[str, Any]:
    """Return the kernels with most work, what the others have together, and the work of each."""
    row = np.concatenate([piece.row for piece in pieces])
    work = np.concatenate([piece.work for piece in pieces])
    wall = np.concatenate([piece.wall for piece in pieces])
    # Of one name when shortened, and of one category: one kernel, in several shapes.
    used = np.unique(table.work["name"][row]).tolist()
    kinds = {name: (shorten(table.names[name]), categories[name]) for name in used}
    known = sorted(set(kinds.values()))
    number = {kind: index for index, kind in enumerate(known)}
    label_of = np.zeros(len(table.names), np.int64)
    for name, kind in kinds.items():
        label_of[name] = number[kind]
    label = label_of[table.work["name"][row]]
    total = max(int(work.sum()), 1)
    order = np.argsort(label, kind="stable")
    edges = np.flatnonzero(np.diff(label[order])) + 1
    found = []
    for group in np.split(order, edges) if len(order) else []:
        text, category = known[int(label[group[0]])]
        calls = _calls(table, row[group], work[group])
        found.append(
            {
                "name": text,
                "category": category,
                "calls": len(calls) / steps,
                "work_ms": int(work[group].sum()) / 1e6 / steps,
                "wall_ms": int(wall[group].sum()) / 1e6 / steps,
                "median_us": float(np.median(calls)) / 1e3,
                "share": int(work[group].sum()) / total,
            }
        )
    found.sort(key=lambda entry: (-entry["work_ms"], entry["name"]))
    rest = found[most:]
    totals: dict[str, float] = {}
    for entry in found:
        totals[entry["name"]] = totals.get(entry["name"], 0.0) + entry["work_ms"]
    return {
        "top": found[:most],
        "others": {
            "kinds": len(rest),
            "calls": sum(entry["calls"] for entry in rest),
            "work_ms": sum(entry["work_ms"] for entry in rest),
            "wall_ms": sum(entry["wall_ms"] for entry in rest),
            "share": sum(entry["share"] for entry in rest),
        },
        "work_ms": totals,
    }


def _calls(table: Table, rows: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Return the time of each call, also if a step's end or other operators divide it."""
    if len(rows) and table.work["kind"][rows[0]] == Kind.OPERATOR:
        keys = table.work["process"][rows].astype(np.int64) << 40 | table.work["correlation"][rows]
    else:
        keys = rows
    _, place = np.unique(keys, return_inverse=True)
    return np.bincount(place, work)


# Which rank the others wait for.
#
# All ranks of a synchronous run take the same time for a step: the fast ones wait in the exchange
# of gradients. A rank's compute time is therefore the step without its exposed communication.


def summarize(table: Table, lanes: list[Lane]) -> dict[str, Any]:
    """Own time of every rank in every step, ms, and who is slowest; empty for one rank."""
    if len(lanes) < 2:
        return {}
    common = _common(lanes)
    own = [
        (lane.wall - lane.parts["communication"])[rows] / 1e6
        for lane, rows in zip(lanes, common, strict=True)
    ]
    labels = lane_labels(table, lanes)
    means = np.array([values.mean() if len(values) else 0.0 for values in own])
    slowest = int(np.argmax(means))
    result: dict[str, Any] = {
        "steps": [int(number) for number in lanes[0].steps.numbers[common[0]]],
        "ranks": [
            {
                "name": label,
                "own_ms": [float(value) for value in values],
                "mean_own_ms": float(mean),
                "communication_ms": float(lane.parts["communication"].mean()) / 1e6,
            }
            for label, values, mean, lane in zip(labels, own, means, lanes, strict=True)
        ],
        "slowest": labels[slowest],
        "slowest_by": float(means[slowest] / means.mean() - 1) if means.mean() else 0.0,
    }
    if len(common[0]):
        grid = np.stack(own)
        result["waiting_ms"] = float((grid.max(0) - grid).mean())
    return result


def _common(lanes: list[Lane]) -> list[np.ndarray]:
    shared = set(lanes[0].steps.numbers.tolist())
    for lane in lanes[1:]:
        shared &= set(lane.steps.numbers.tolist())
    return [
        np.flatnonzero(np.isin(lane.steps.numbers, np.array(sorted(shared), np.int64)))
        for lane in lanes
    ]


def lane_labels(table: Table, lanes: list[Lane]) -> list[str]:
    processes = [lane.process for lane in lanes]
    return [
        table.processes[lane.process].label
        + (f" GPU {lane.device}" if processes.count(lane.process) > 1 else "")
        for lane in lanes
    ]


# A picture of one step: which phase the host is in, what each stream does, what is idle.
#
# Drawn at the resolution of a screen: of every column, what fills most of it.

COLUMNS = 900
_MOST_ROWS = 6


def picture(
    table: Table, lane: Lane, attribution: Attribution, category: np.ndarray
) -> dict[str, Any]:
    """Return the step of median length of a lane."""
    step = int(np.argsort(lane.wall, kind="stable")[(len(lane.wall) - 1) // 2])
    begin, end = (int(edge) for edge in lane.steps.windows[step])
    rows = [_row("budget", *_of_parts(lane, begin, end), list(PARTS), begin, end)]
    phases = _of_host(table, lane, begin, end)
    if phases is not None:
        rows.append(_row("host", *phases, begin, end))
    work = table.work[lane.rows]
    inside = (work["end"] > begin) & (work["start"] < end)
    kind = "stream" if table.has_gpu else "thread"
    streams, counts = np.unique(work["stream"][inside], return_counts=True)
    busiest = streams[np.lexsort((streams, -counts))][:_MOST_ROWS]
    for stream in sorted(busiest.tolist()):
        own = np.flatnonzero(inside & (work["stream"] == stream))
        rows.append(
            _row(
                f"{kind} {stream & 0xFFFFFF}",
                *(work["start"][own], work["end"][own], category[lane.rows[own]]),
                *(list(CATEGORIES), begin, end),
            )
        )
    return {
        "process": table.processes[lane.process].label,
        "step": int(lane.steps.numbers[step]),
        "length_ms": (end - begin) / 1e6,
        "rows": rows,
        "streams_left_out": len(streams) - len(busiest),
    }


def _of_parts(lane: Lane, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    sets = [intervals.clip(lane.moments[name], begin, end) for name in PARTS]
    labels = np.concatenate([np.full(len(own), number) for number, own in enumerate(sets)])
    everything = np.concatenate(sets)
    return everything[:, 0], everything[:, 1], labels.astype(np.int64)


def _of_host(
    table: Table, lane: Lane, begin: int, end: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]] | None:
    """Return the outermost ranges below the step on its thread."""
    ranges, steps = table.ranges, lane.steps
    chosen = (ranges["process"] == lane.process) & ~ranges["is_op"]
    chosen &= (ranges["end"] > begin) & (ranges["start"] < end)
    if steps.is_found:
        chosen &= ranges["thread"] == steps.thread
    marks = np.array([text.startswith("ProfilerStep#") for text in table.names], bool)
    rows = np.setdiff1d(np.flatnonzero(chosen), steps.containers)
    rows = rows[~marks[ranges["name"][rows]]]
    if not len(rows):
        return None
    rows = rows[np.lexsort((-ranges["end"][rows], ranges["start"][rows]))]
    reached = np.maximum.accumulate(ranges["end"][rows])
    top = np.append(True, ranges["start"][rows][1:] >= reached[:-1])
    rows = rows[top]
    used, place = np.unique(ranges["name"][rows], return_inverse=True)
    texts = [table.names[name] for name in used]
    return ranges["start"][rows], ranges["end"][rows], place, texts


def _row(
    name: str,
    begins: np.ndarray,
    ends: np.ndarray,
    labels: np.ndarray,
    texts: list[str],
    begin: int,
    end: int,
) -> dict[str, Any]:
    edges = np.linspace(begin, end, COLUMNS + 1).round().astype(np.int64)
    columns = np.stack([edges[:-1], edges[1:]], axis=1)
    columns = columns[columns[:, 1] > columns[:, 0]]
    item, column, first, last = intervals.split(begins, ends, columns)
    filled = np.zeros((len(columns), len(texts)), np.int64)
    np.add.at(filled, (column, labels[item]), last - first)
    # A column that nothing fills to a third shows nothing.
    enough = filled.sum(1) * 3 >= columns[:, 1] - columns[:, 0]
    shown = np.where(enough, filled.argmax(1), -1)
    changes = np.flatnonzero(np.diff(shown)) + 1
    segments = []
    for group in np.split(np.arange(len(shown)), changes):
        if len(group) and shown[group[0]] >= 0:
            span = columns[group[0], 0] - begin, columns[group[-1], 1] - begin
            segments.append([span[0] / 1e6, span[1] / 1e6, texts[shown[group[0]]]])
    return {"name": name, "segments": segments}
