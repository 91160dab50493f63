"""Which rank the others wait for.

All ranks of a synchronous run take the same time for a step, and the fast ones spend the difference
in the exchange of gradients. A rank's own time is therefore the step without its exposed
communication; the slowest rank is the one with most of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.budget import Lane
from analysis.readers.table import Table


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
    """Return for each lane the rows of the steps that all lanes have, by step number."""
    shared = set(lanes[0].steps.numbers.tolist())
    for lane in lanes[1:]:
        shared &= set(lane.steps.numbers.tolist())
    return [
        np.flatnonzero(np.isin(lane.steps.numbers, np.array(sorted(shared), np.int64)))
        for lane in lanes
    ]


def lane_labels(table: Table, lanes: list[Lane]) -> list[str]:
    """Return a name for each lane; with the device where a process has several."""
    processes = [lane.process for lane in lanes]
    return [
        table.processes[lane.process].label
        + (f" GPU {lane.device}" if processes.count(lane.process) > 1 else "")
        for lane in lanes
    ]
