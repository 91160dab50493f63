"""Tables of work inside the steps: by kernel, category, phase and range.

Two figures for each row: ``work``, the summed durations, and ``wall``, what it adds to the time in
which anything runs. Summed work may exceed the time of the steps where streams overlap; wall time
adds up to the busy time of the devices exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis import intervals
from analysis.attribution import RULES, Attribution
from analysis.budget import PARTS, Lane
from analysis.categories import shorten
from analysis.readers.table import Kind, Table


@dataclass(frozen=True, slots=True)
class Pieces:
    """Work cut at the edges of steps: each piece lies in one step.

    Attributes:
        row: Row of the work.
        step: Step of the lane, counted from 0.
        work: Duration, ns.
        wall: Time that it adds to the union of all work of the lane, ns.
    """

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
    """Work and wall time by category, most work first, per step and rank, ms.

    Args:
        category: Category for each row of work, a number into ``names``.
        names: Names of the categories.
        part: Part of each row of work, an index into `PARTS`: ``compute_ms`` is the wall time of
            compute, without the copies and the communication of the budget.
        pieces: Pieces of every lane.
        steps: Steps of all lanes together.
    """
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
    """Return the time of each call, also if a step's end or other operators divide it.

    Args:
        table: The capture.
        rows: Rows of the work, one a piece.
        work: Duration of each piece.
    """
    if len(rows) and table.work["kind"][rows[0]] == Kind.OPERATOR:
        keys = table.work["process"][rows].astype(np.int64) << 40 | table.work["correlation"][rows]
    else:
        keys = rows
    _, place = np.unique(keys, return_inverse=True)
    return np.bincount(place, work)
