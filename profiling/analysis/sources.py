"""Resolves the command-line inputs: captures, run directories, or both."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from analysis import kineto, nsys
from analysis.table import Note, Table, merge

METRICS = "metrics.jsonl"
_SQLITE = b"SQLite format 3\x00"
_REPORTS = {".nsys-rep", ".qdrep", ".qdstrm"}
_TRACES = ("*.sqlite", "*.json", "*.json.gz")
# Of what else is in a run directory, nothing is a capture.
_NOT_TRACES = {"checkpoints", "evaluation"}


@dataclass(slots=True)
class Subject:
    name: str
    captures: list[Path] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def table(self) -> Table:
        tables = {path: read(path) for path in self.captures}
        kinds: dict[tuple[bool, bool], Path] = {}
        for path, table in tables.items():
            kinds.setdefault((path.suffix == ".sqlite", table.has_gpu), path)
        if len(kinds) > 1:
            first, second, *_ = kinds.values()
            raise ValueError(
                "captures must all be of one profiler, and all with work of a GPU or all without, "
                f"but `{first}` and `{second}` differ: report each kind by itself."
            )
        return merge(tables.values())


def gather(paths: list[Path]) -> Subject:
    subject = Subject(_name(paths[0]))
    for path in paths:
        if path.is_dir():
            _add_folder(subject, path)
        elif path.name == METRICS:
            subject.metrics += read_metrics(path)
        elif path.is_file():
            subject.captures.append(path)
        else:
            raise ValueError(f"`{path}` must be a capture or a run directory, but does not exist.")
    return subject


def is_run(path: Path) -> bool:
    return (path / METRICS).is_file()


def _name(path: Path) -> str:
    name = path.resolve().name
    for suffix in (".gz", ".json", ".sqlite", ".pt.trace"):
        name = name.removesuffix(suffix)
    return name


def _add_folder(subject: Subject, folder: Path) -> None:
    for path in sorted({path for pattern in _TRACES for path in folder.rglob(pattern)}):
        parts = set(path.relative_to(folder).parts)
        if parts & _NOT_TRACES or path.name.startswith("unfinished_"):
            continue
        if _is_capture(path):
            subject.captures.append(path)
    if is_run(folder):
        subject.metrics += read_metrics(folder / METRICS)
    elif not any(folder in path.parents for path in subject.captures):
        raise ValueError(
            f"`{folder}` must hold {METRICS} or captures (.sqlite, .json, .json.gz), but holds "
            "neither."
        )


def _is_capture(path: Path) -> bool:
    """Return whether a file found in a folder is a capture: there may be other JSON files."""
    with path.open("rb") as file:
        start = file.read(65536)
    if start.startswith(_SQLITE):
        return True
    if path.suffix == ".gz":
        return start.startswith(b"\x1f\x8b")
    return b'"traceEvents"' in start and kineto.MARK.encode() not in start


def read(path: Path) -> Table:
    if path.suffix in _REPORTS:
        raise ValueError(
            f"`{path}` must be an export, but is a report of nsys: make one with `nsys export "
            f"--type sqlite {path.name}`."
        )
    if path.exists() and not path.is_file():
        # A pipe would wait for a writer.
        raise ValueError(f"`{path}` must be a file, but is a folder, a pipe or a device.")
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(_SQLITE):
        return nsys.read(path)
    if start.startswith(b"\x1f\x8b") or start.lstrip()[:1] in (b"{", b"["):
        return kineto.read(path)
    raise ValueError(
        f"`{path}` must be an SQLite export of nsys or a JSON trace of torch.profiler, but is "
        "neither."
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl; one that was cut short at the end is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    entries: list[dict[str, Any]] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            if any(remainder.strip() for remainder in lines[number:]):
                raise ValueError(f"line {number} of `{path}` must be JSON, but {error}.") from error
            break
        if isinstance(line, dict):
            entries.append(line)
    return entries


def column(metrics: list[dict[str, Any]], key: str) -> list[float]:
    is_number = lambda x: isinstance(x, int | float) and not isinstance(x, bool)
    values = (line.get(key) for line in metrics)
    return [float(value) for value in values if is_number(value) and math.isfinite(value)]


# Reads metrics.jsonl of a run: padding, waiting time, FLOPs utilisation.

_PADDING = {"padding_frames": "audio frames", "padding_tokens": "tokens"}
_USEFUL, _PADDED, _HARDWARE = "mfu", "mfu_with_padding", "hfu"
_BINS = 20
_SUMMARIZED = (
    *("step_s", "data_wait_s", "rank_imbalance", "audio_seconds", "tokens", "useful_tflops"),
)


def summarize_log(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    if not metrics:
        return {}
    summary: dict[str, Any] = {"lines": len(metrics), "last_step": metrics[-1].get("step")}
    columns = {key: column(metrics, key) for key in _SUMMARIZED}
    for key, values in columns.items():
        if values:
            figures = {"median": np.median, "mean": np.mean, "max": np.max}
            summary[key] = {name: float(figure(values)) for name, figure in figures.items()}
    steps, waits, audio = (columns[x] for x in ("step_s", "data_wait_s", "audio_seconds"))
    if steps and len(waits) == len(steps) and sum(steps):
        summary["data_wait_share"] = sum(waits) / sum(steps)
    if steps and len(audio) == len(steps):
        summary["audio_hours_per_hour"] = sum(audio) / sum(steps)
    if memory := column(metrics, "peak_memory_bytes"):
        summary["peak_memory_bytes"] = max(memory)
    return summary


def padding(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    histograms = {}
    for key, label in _PADDING.items():
        values = np.array(column(metrics, key))
        if not len(values):
            continue
        top = max(float(values.max()), 0.005)
        # Edges at whole steps of a power of ten, or of twice or five times one.
        width = _round_up(top / _BINS)
        edges = np.arange(0, int(np.ceil(top / width + 1e-9)) + 1) * width
        counts, _ = np.histogram(np.clip(values, 0, edges[-1]), edges)
        histograms[key] = {
            "label": label,
            "mean": float(values.mean()),
            "max": float(values.max()),
            "edges": [float(edge) for edge in edges],
            "counts": [int(count) for count in counts],
        }
    return histograms


def _round_up(width: float) -> float:
    power = 10 ** np.floor(np.log10(width))
    return float(next(m * power for m in (1, 2, 5, 10) if m * power >= width * (1 - 1e-9)))


def waterfall(metrics: list[dict[str, Any]], padding: dict[str, Any]) -> dict[str, Any]:
    useful = _median(metrics, _USEFUL)
    if useful is None:
        return {
            "reason": "metrics.jsonl has no mfu: the peak of this device is not known, or FLOPs "
            "were not counted"
            if metrics
            else "no run directory was given, so neither FLOPs nor padding are known"
        }
    padded, hardware = _median(metrics, _PADDED), _median(metrics, _HARDWARE)
    is_estimate = padded is None
    if padded is None:
        frames = padding.get("padding_frames", {}).get("mean")
        if frames is None or frames >= 1:
            return {"reason": "metrics.jsonl has mfu, but neither padded FLOPs nor padding_frames"}
        padded = useful / (1 - frames)
    bars = [{"name": "peak of the GPU", "share": 1.0}]
    # Where nothing is computed again, both are one.
    if hardware is not None and hardware > padded:
        bars.append({"name": "achieved, recomputation included", "share": hardware})
    bars.append({"name": "achieved, padding included", "share": padded})
    bars.append({"name": "useful", "share": useful})
    return {"bars": bars, "is_estimate": is_estimate}


def _median(metrics: list[dict[str, Any]], key: str) -> float | None:
    values = column(metrics, key)
    return float(np.median(values)) if values else None
