"""Figures to reach on a GPU, as gpu.yaml lists them, and those that gpu.py has measured."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Row = Mapping[str, str]
Rows = Mapping[str, Sequence[Row]]
FILES = ("ops", "training", "encoder", "inference", "matmul_peak", "memory")
LESS_IS_BETTER = {"p50_ms", "peak_bytes", "padding_frames", "padding_tokens"}
WARM = 5  # steps of a real training whose peak of memory the later ones must not exceed
TARGETS = yaml.safe_load(Path(__file__).with_name("gpu.yaml").read_text(encoding="utf-8"))[
    "targets"
]


def read_rows(folder: Path) -> dict[str, list[Row]]:
    """Return the whole rows of the tables; a process may have been killed while it wrote one."""
    rows: dict[str, list[Row]] = {name: [] for name in FILES}
    for name in FILES:
        path = folder / f"{name}.csv"
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                whole = lambda row: None not in row and None not in row.values()
                rows[name] = [row for row in csv.DictReader(file) if whole(row)]
    metrics = folder / "real_training" / "runs" / "quiet_metrics.jsonl"
    if metrics.exists():
        lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
        names = ("step", "peak_memory_bytes")
        rows["memory"] = [{name: str(line[name]) for name in names} for line in lines]
    return rows


def _matches(row: Row, field: str, wanted: str | list[str]) -> bool:
    options = [wanted] if isinstance(wanted, str) else wanted
    if field == "shape":
        return any(set(words.split()) <= set(row["shape"].split()) for words in options)
    return row[field] in options


def _best(rows: Rows, target: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[tuple, float]:
    """Return the best figure of the chosen rows for each key."""
    fields = dict(chosen)
    table, column = fields.pop("table"), fields.pop("column", target["column"])
    better = min if column in LESS_IS_BETTER else max
    best: dict[tuple, float] = {}
    for row in rows[table]:
        if row[column] and all(_matches(row, *field) for field in fields.items()):
            if (per := target.get("per")) and not row[per]:
                continue
            value = float(row[column]) / (float(row[per]) if per else 1.0)
            # The figures that ours are compared with may be the same for all keys.
            key = tuple(row[name] for name in target.get("key", ()) if name in row)
            best[key] = better(best.get(key, value), value)
    return best


def measure(rows: Rows, target: Mapping[str, Any]) -> float | None:
    figures = _best(rows, target, target["ours"])
    at_most = "at_most" in target
    if "against" in target:
        others = _best(rows, target, target["against"])
        pairs = {key: (x, others.get(key, others.get(()))) for key, x in figures.items()}
        # How many times as fast: of times the others' by ours.
        by_others = at_most or target["column"] not in LESS_IS_BETTER
        figures = {key: x / y if by_others else y / x for key, (x, y) in pairs.items() if x and y}
    worst = max if at_most else min
    return worst((x * target.get("scale", 1) for x in figures.values()), default=None)


def _growth(memory: Sequence[Row]) -> list[Row]:
    peaks = [int(row["peak_memory_bytes"]) for row in memory]
    grown = max(peaks[WARM:], default=0) - max(peaks[:WARM], default=0)
    return [{"growth": str(grown)}] if len(peaks) > WARM else []


def table(rows: Rows, *, dry: bool) -> list[tuple[str, str, str, str]]:
    rows = {**rows, "memory": _growth(rows["memory"])}
    lines = []
    for target in TARGETS:
        value, unit = measure(rows, target), f" {target['unit']}".rstrip()
        at_most = "at_most" in target
        bound = target["at_most"] if at_most else target["at_least"]
        measured = "-" if value is None else f"{value:.3g}{unit}"
        verdict = "not measured" if value is None else "dry run"
        if value is not None and not dry:
            verdict = "met" if (value <= bound if at_most else value >= bound) else "missed"
        lines.append(
            (target["what"], f"{'<=' if at_most else '>='} {bound:g}{unit}", measured, verdict)
        )
    return lines
