"""The whole analysis of one subject: the mapping that becomes report.json and the page."""

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
from analysis.steps import PROFILER_STEP
from analysis.table import Kind, Note, Table, outermost


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
    steps_of = {
        process: steps.find(table, process, launches.begin, name=step_range, skip=skip)
        for process in working
    }
    attribution = labels.attribute(table, launches, steps_of)
    categories = [categorize(name) for name in table.names]
    part = classes(table, categories)
    lanes = find_lanes(table, launches, steps_of, attribution, part)
    report = _of_log(subject, table)
    rules: dict[str, float] = {}
    if lanes:
        of_name = np.array([CATEGORIES.index(name) for name in categories], np.int64)
        category, count = of_name[table.work["name"]], sum(len(lane.wall) for lane in lanes)
        pieces = cut(table, lanes, part)
        # The lane with most time of its own: the slowest rank.
        own_ns = [float((lane.wall - lane.parts["communication"]).mean()) for lane in lanes]
        slowest = lanes[int(np.argmax(own_ns))]
        report |= {
            "budget": _budget(table, lanes),
            "categories": by_category(category, part, pieces, count),
            "phases": by_phase(pieces, attribution, category, count),
            "ranges": by_range(pieces, attribution, count),
            "kernels": kernels(table, pieces, categories, count),
            "ranks": summarize(table, lanes),
            "timeline": picture(table, slowest, attribution, category),
        }
        rules = by_rule(pieces, attribution)
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


def _budget(table: Table, lanes: list[Lane]) -> dict[str, Any]:
    walls = np.concatenate([lane.wall for lane in lanes])
    total, count = int(walls.sum()), len(walls)
    sums = {name: sum(int(lane.parts[name].sum()) for lane in lanes) for name in PARTS}
    idle = {name: sum(int(lane.idle[name].sum()) for lane in lanes) for name in IDLE}
    hidden = sum(int(lane.hidden.sum()) for lane in lanes)
    # Exact by construction; a report whose parts do not add up would be worse than none.
    if sum(sums.values()) != total or sum(idle.values()) != sums["idle"]:
        raise RuntimeError(f"the parts {sums} and {idle} do not add up to {total} ns")
    part = lambda name, value: {
        **{"name": name, "ns": value, "ms": value / 1e6 / count, "share": value / total},
    }
    labels = lane_labels(table, lanes)
    figures = {"median": np.median, "min": np.min, "max": np.max}
    return {
        "has_gpu": table.has_gpu,
        "is_stepwise": all(lane.steps.is_found for lane in lanes),
        "ranks": len(lanes),
        "steps": max(len(lane.steps.windows) for lane in lanes),
        "windows": count,
        "wall_ns": total,
        "step_ms": {"mean": total / 1e6 / count}
        | {name: float(figure(walls)) / 1e6 for name, figure in figures.items()},
        "parts": [part(name, value) for name, value in sums.items()],
        "idle": [part(name, value) for name, value in idle.items()],
        "hidden_communication": part("hidden_communication", hidden),
        "per_rank": [
            {
                "name": label,
                "steps": len(lane.steps.windows),
                "step_ms": float(lane.wall.mean()) / 1e6,
                "parts_ms": {name: float(lane.parts[name].mean()) / 1e6 for name in PARTS},
            }
            for label, lane in zip(labels, lanes, strict=True)
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
    work: np.ndarray
    wall: np.ndarray


def cut(table: Table, lanes: Sequence[Lane], part: np.ndarray) -> Pieces:
    """Return the work of lanes inside their steps.

    Where work overlaps, compute counts first, then communication, then copies: as in the budget.
    """
    pieces = []
    for lane in lanes:
        starts, ends = table.work["start"][lane.rows], table.work["end"][lane.rows]
        item, _, begin, end = intervals.split(starts, ends, lane.steps.windows)
        wall = np.zeros(len(item), np.int64)
        turns, kind = _turns(table, lane.rows)[item], part[lane.rows][item]
        for number, name in enumerate(PARTS[:3]):
            rows = np.flatnonzero(kind == number)
            # In the order of begin, each moment counts for the first; hidden time counts nowhere.
            times = begin[rows], end[rows], turns[rows]
            wall[rows] = intervals.increments(*times, lane.moments[name])
        pieces.append((lane.rows[item], end - begin, wall))
    return Pieces(*(np.concatenate(column) for column in zip(*pieces, strict=True)))


def _turns(table: Table, rows: np.ndarray) -> np.ndarray:
    """Return the place of each row's name in the alphabet: it decides between equal spans."""
    used, position = np.unique(table.work["name"][rows], return_inverse=True)
    texts = np.array([table.names[name] for name in used], object)
    ranks = np.empty(len(used), np.int64)
    ranks[np.argsort(texts, kind="stable")] = np.arange(len(used))
    return ranks[position] if len(used) else position


def _sums(labels: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Return the sums of values by label; exact, unlike `np.bincount` with weights."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, labels, values)
    return sums


def _rows(
    names: Sequence[str], total: np.ndarray, steps: int, **columns: np.ndarray
) -> list[dict[str, Any]]:
    """Return a row for each name that has work, most work first: columns in ns, per step in ms."""
    whole = max(int(total.sum()), 1)
    rows = [
        {"name": names[n]}
        | {f"{column}_ms": int(values[n]) / 1e6 / steps for column, values in columns.items()}
        | {"share": int(total[n]) / whole}
        for n in np.flatnonzero(total).tolist()
    ]
    return sorted(rows, key=lambda row: (-row["share"], row["name"]))


def by_category(category: np.ndarray, part: np.ndarray, pieces: Pieces, steps: int) -> list[dict]:
    labels = category[pieces.row]
    sums = lambda values: _sums(labels, values, len(CATEGORIES))
    work, wall = sums(pieces.work), sums(pieces.wall)
    compute = sums(np.where(part[pieces.row] == 0, pieces.wall, 0))
    return _rows(CATEGORIES, work, steps, work=work, wall=wall, compute=compute)


def by_phase(
    pieces: Pieces, attribution: Attribution, category: np.ndarray, steps: int
) -> dict[str, Any]:
    sums = np.zeros((len(attribution.paths), len(CATEGORIES)), np.int64)
    np.add.at(sums, (attribution.phase[pieces.row], category[pieces.row]), pieces.work)
    phases = np.flatnonzero(sums.sum(1)).tolist()
    phases.sort(key=lambda n: (-int(sums[n].sum()), attribution.paths[n]))
    used = np.flatnonzero(sums.sum(0))
    return {
        "phases": [attribution.paths[number] for number in phases],
        "categories": [CATEGORIES[number] for number in used],
        "work_ms": [[int(sums[n, c]) / 1e6 / steps for c in used] for n in phases],
    }


def by_range(pieces: Pieces, attribution: Attribution, steps: int) -> list[dict[str, Any]]:
    labels, is_backward = attribution.path[pieces.row], attribution.is_backward[pieces.row]
    sums = lambda values: _sums(labels, values, len(attribution.paths))
    forward, backward = (sums(pieces.work * rows) for rows in (~is_backward, is_backward))
    columns = {"forward": forward, "backward": backward, "wall": sums(pieces.wall)}
    return _rows(attribution.paths, forward + backward, steps, **columns)


def by_rule(pieces: Pieces, attribution: Attribution) -> dict[str, float]:
    sums = _sums(attribution.rule[pieces.row], pieces.work, len(RULES)).tolist()
    return {rule: work / max(sum(sums), 1) for rule, work in zip(RULES, sums, strict=True)}


def kernels(
    table: Table, pieces: Pieces, categories: list[str], steps: int, most: int = 40
) -> dict[str, Any]:
    """Return the kernels with most work, what the others have together, and the work of each."""
    # Of one name when shortened, and of one category: one kernel, in several shapes.
    names, position = np.unique(table.work["name"][pieces.row], return_inverse=True)
    kinds = [(shorten(table.names[name]), categories[name]) for name in names.tolist()]
    distinct = sorted(set(kinds))
    number = {kind: index for index, kind in enumerate(distinct)}
    labels = np.array([number[kind] for kind in kinds], np.int64)[position]
    total = max(int(pieces.work.sum()), 1)
    order, rows = np.argsort(labels, kind="stable"), []
    groups = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    for (name, category), chosen in zip(distinct, groups, strict=False):
        calls = _calls(table, pieces.row[chosen], pieces.work[chosen])
        work = int(pieces.work[chosen].sum())
        row = {"name": name, "category": category, "calls": len(calls) / steps}
        row |= {"work_ms": work / 1e6 / steps}
        row |= {"wall_ms": int(pieces.wall[chosen].sum()) / 1e6 / steps}
        rows.append(row | {"median_us": float(np.median(calls)) / 1e3, "share": work / total})
    rows.sort(key=lambda row: (-row["work_ms"], row["name"]))
    remaining = rows[most:]
    totals: dict[str, float] = {}
    for row in rows:
        totals[row["name"]] = totals.get(row["name"], 0.0) + row["work_ms"]
    columns = ("calls", "work_ms", "wall_ms", "share")
    return {
        "top": rows[:most],
        "others": {"kinds": len(remaining)}
        | {key: sum(row[key] for row in remaining) for key in columns},
        "work_ms": totals,
    }


def _calls(table: Table, rows: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Return the time of each call, also if a step's end or other operators divide it."""
    keys = rows
    if len(rows) and table.work["kind"][rows[0]] == Kind.OPERATOR:
        keys = table.work["process"][rows].astype(np.int64) << 40 | table.work["correlation"][rows]
    _, position = np.unique(keys, return_inverse=True)
    return np.bincount(position, work)


# Which rank the others wait for.
#
# All ranks of a synchronous run take the same time for a step: the fast ones wait in the exchange
# of gradients. A rank's compute time is therefore the step without its exposed communication.


def summarize(table: Table, lanes: list[Lane]) -> dict[str, Any]:
    """Own time of every rank in every step, ms, and who is slowest; empty for one rank."""
    if len(lanes) < 2:
        return {}
    shared = set.intersection(*(set(lane.steps.numbers.tolist()) for lane in lanes))
    is_shared = [np.isin(lane.steps.numbers, list(shared)) for lane in lanes]
    own_ns = [
        (lane.wall - lane.parts["communication"])[rows] / 1e6
        for lane, rows in zip(lanes, is_shared, strict=True)
    ]
    labels = lane_labels(table, lanes)
    means = np.array([values.mean() if len(values) else 0.0 for values in own_ns])
    slowest = int(np.argmax(means))
    result: dict[str, Any] = {
        "steps": lanes[0].steps.numbers[is_shared[0]].tolist(),
        "ranks": [
            {
                "name": label,
                "own_ms": values.tolist(),
                "mean_own_ms": float(mean),
                "communication_ms": float(lane.parts["communication"].mean()) / 1e6,
            }
            for label, values, mean, lane in zip(labels, own_ns, means, lanes, strict=True)
        ],
        "slowest": labels[slowest],
        "slowest_by": float(means[slowest] / means.mean() - 1) if means.mean() else 0.0,
    }
    if shared:
        grid = np.stack(own_ns)
        result["waiting_ms"] = float((grid.max(0) - grid).mean())
    return result


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
    step = int(np.argsort(lane.wall, kind="stable")[(len(lane.wall) - 1) // 2])
    begin, end = (int(edge) for edge in lane.steps.windows[step])
    sets = [intervals.clip(lane.moments[name], begin, end) for name in PARTS]
    labels = np.repeat(np.arange(len(sets)), [len(moments) for moments in sets])
    rows = [_row("budget", *np.concatenate(sets).T, labels, list(PARTS), begin, end)]
    phases = _of_host(table, lane, begin, end)
    if phases is not None:
        rows.append(_row("host", *phases, begin, end))
    work = table.work[lane.rows]
    inside = (work["end"] > begin) & (work["start"] < end)
    kind = "stream" if table.has_gpu else "thread"
    streams, counts = np.unique(work["stream"][inside], return_counts=True)
    busiest = streams[np.lexsort((streams, -counts))][:_MOST_ROWS]
    for stream in sorted(busiest.tolist()):
        local = np.flatnonzero(inside & (work["stream"] == stream))
        rows.append(
            _row(
                f"{kind} {stream & 0xFFFFFF}",
                *(work["start"][local], work["end"][local], category[lane.rows[local]]),
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


def _of_host(
    table: Table, lane: Lane, begin: int, end: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]] | None:
    """Return the outermost ranges below the step on its thread."""
    ranges, steps = table.ranges, lane.steps
    rows = table.annotations(lane.process, steps.thread if steps.is_found else None)
    rows = rows[(ranges["end"][rows] > begin) & (ranges["start"][rows] < end)]
    rows = np.setdiff1d(rows, steps.containers)
    rows = outermost(ranges, rows[~table.matches(PROFILER_STEP)[ranges["name"][rows]]])
    if not len(rows):
        return None
    used, position = np.unique(ranges["name"][rows], return_inverse=True)
    texts = [table.names[name] for name in used]
    return ranges["start"][rows], ranges["end"][rows], position, texts


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
    label_of_column = np.where(enough, filled.argmax(1), -1)
    changes = np.flatnonzero(np.diff(label_of_column)) + 1
    segments = []
    for group in np.split(np.arange(len(label_of_column)), changes):
        if len(group) and label_of_column[group[0]] >= 0:
            span = columns[group[0], 0] - begin, columns[group[-1], 1] - begin
            segments.append([span[0] / 1e6, span[1] / 1e6, texts[label_of_column[group[0]]]])
    return {"name": name, "segments": segments}
