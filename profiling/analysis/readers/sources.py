"""Resolves the command-line inputs: captures, run directories, or both."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.readers import kineto, nsys
from analysis.readers.table import Note, Table, merge

METRICS = "metrics.jsonl"
_SQLITE = b"SQLite format 3\x00"
_REPORTS = {".nsys-rep", ".qdrep", ".qdstrm"}
_TRACES = ("*.sqlite", "*.json", "*.json.gz")
# Of what else is in a run directory, nothing is a capture.
_NOT_TRACES = {"checkpoints", "evaluation"}


@dataclass(slots=True)
class Subject:
    """The input of one report.

    Attributes:
        name: Name of the run directory or the first file.
        captures: Files with captures, of one rank each or of several.
        metrics: Lines of metrics.jsonl, oldest first.
        notes: Notes on files that could not be read.
    """

    name: str
    captures: list[Path] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def table(self) -> Table:
        """Read all captures."""
        return merge(read(path) for path in self.captures)


def gather(paths: list[Path]) -> Subject:
    """Look at what was named.

    Args:
        paths: Captures, folders of captures and run directories, of one run.

    Raises:
        ValueError: A path does not exist, or holds nothing to report on.
    """
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
    """Return whether a path is a run directory."""
    return (path / METRICS).is_file()


def _name(path: Path) -> str:
    name = path.resolve().name
    for suffix in (".gz", ".json", ".sqlite", ".pt.trace"):
        name = name.removesuffix(suffix)
    return name


def _add_folder(subject: Subject, folder: Path) -> None:
    found = sorted({path for pattern in _TRACES for path in folder.rglob(pattern)})
    for path in found:
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
    """Read a capture of whichever profiler.

    Raises:
        ValueError: It is of neither.
    """
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
    """Return the lines of a metrics.jsonl; one that was cut short at the end is left out.

    Raises:
        ValueError: A line before the last is damaged.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    found: list[dict[str, Any]] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            if any(rest.strip() for rest in lines[number:]):
                raise ValueError(f"line {number} of `{path}` must be JSON, but {error}.") from error
            break
        if isinstance(line, dict):
            found.append(line)
    return found


def column(metrics: list[dict[str, Any]], key: str) -> list[float]:
    """Return the finite numbers under a key, of the lines that have one."""
    values = [line.get(key) for line in metrics]
    return [
        float(value)
        for value in values
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ]
