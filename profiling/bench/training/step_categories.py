"""Divides the time of recorded training steps by category of kernel: rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analysis import sources, summary

COLUMNS = (
    *("system", "model", "mode", "graph", "compile", "precision", "frame_budget", "category"),
    *("work_ms", "wall_ms", "share", "step_ms", "steps", "device", "torch", "triton", "git"),
    "date",
)
_WAITING = {"data_wait": "wait for data", "host_gap": "host gap"}


def of_trace(trace: Path) -> Iterator[dict[str, Any]]:
    """Yield a row per category, in ms of a step: summed work and its share of the step's time.

    ``work_ms`` counts overlapping kernels twice; ``wall_ms`` adds up to ``step_ms`` over all rows,
    those where the device waits included.

    Args:
        trace: Trace written by `bench.training.systems.Effasr.record`.

    Raises:
        ValueError: It is damaged, or holds no work.
    """
    report = summary.analyze(sources.gather([trace])).report
    budget = report["budget"]
    if budget is None:
        raise ValueError(f"`{trace}` must hold work of a device or a host, but holds none.")
    step = budget["step_ms"]["mean"]
    shared = {"step_ms": round(step, 4), "steps": budget["windows"]}
    for entry in report["categories"]:
        yield shared | _row(entry["name"], entry["work_ms"], entry["wall_ms"], step)
    waiting = [part for part in budget["parts"] if part["name"] in _WAITING]
    for part in waiting:
        yield shared | _row(_WAITING[part["name"]], 0.0, part["ms"], step)
    for part in budget["idle"]:
        yield shared | _row(f"idle: {part['name']}", 0.0, part["ms"], step)


def _row(name: str, work: float, wall: float, step: float) -> dict[str, Any]:
    return {
        "category": name,
        "work_ms": round(work, 4),
        "wall_ms": round(wall, 4),
        "share": round(wall / step, 4) if step else 0.0,
    }


def text(rows: list[dict[str, Any]]) -> str:
    """Return the categories with most time, on one line."""
    largest = sorted(rows, key=lambda row: -row["wall_ms"])[:8]
    return ", ".join(f"{row['category']} {row['wall_ms']:.2f} ms" for row in largest)
