"""Reads what `nsys export --type sqlite` wrote, of any version: by the tables that are there.

Tables are made only when there is something to put in, and gain columns with every version
(NVIDIA Nsight Systems User Guide, "SQLite Schema Reference"): columns are asked for by name, and
one that is absent is filled with what it would have held.
"""

import functools
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from analysis.table import (
    LAUNCH,
    NONE,
    RANGE,
    WORK,
    Kind,
    Names,
    Note,
    Process,
    Table,
    is_backward_name,
    link_by_sequence,
)

_MOST_VALUE_BYTES = 1 << 24
_PROCESS_MASK = 0xFFFFFFFFFF000000
_RUNTIME, _KERNEL, _COPY, _FILL, _GRAPH = (
    f"CUPTI_ACTIVITY_KIND_{name}"
    for name in ("RUNTIME", "KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
)
_RANGES = "NVTX_EVENTS"
_OVERHEADS = ("CUPTI_ACTIVITY_KIND_OVERHEAD", "PROFILER_OVERHEAD")
_PUSH_POP, _START_END, _DOMAIN = 59, 60, 75
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP", 11: "Unified HtoD", 12: "Unified DtoH"}
_MEMORY_KINDS = {0: "pageable", 1: "pinned", 2: "device"}
# What torch.autograd.profiler.emit_nvtx adds to the name of an operator.
_EMITTED = re.compile(r"(?:, seq = (\d+))?(?:, op_id = \d+)?(?:, sizes = .*)?", re.DOTALL)
# Of a namespace; what `record_function` marks comes with the same additions, but is no operator.
_OPERATOR = re.compile(r"[a-z_]\w*::")
_LOST = re.compile(r"dropped|lost|overflow|not all (NVTX|CUDA) events", re.IGNORECASE)


def read(path: Path) -> Table:
    with _errors_of(path), closing(_open(path)) as connection:
        reader = _Reader(connection, path)
        if not reader.columns.keys() & {_RUNTIME, _KERNEL, _RANGES, _GRAPH, "StringIds"}:
            raise ValueError(
                f"`{path}` must be an SQLite export of nsys, but has none of its tables: make one "
                "with `nsys export --type sqlite REPORT.nsys-rep`."
            )
        return reader.table()


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise ValueError(
            f"`{path}` must be a whole SQLite file, but {error}: export the report again."
        ) from error
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"`{path}` must be an SQLite export of nsys, but has values of another kind "
            f"({type(error).__name__}: {str(error)[:200]}): export the report again."
        ) from error


def _open(path: Path) -> sqlite3.Connection:
    # Names cut off inside a character are no reason to fail.
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    # Functions of a schema are not those of the file's maker.
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_VALUE_BYTES)
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    return connection


class _Reader:
    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection, self.path = connection, path
        tables = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table'"
        ).fetchall()
        self.columns = {
            name: {row[1] for row in connection.execute(f'PRAGMA table_info("{name}")')}
            for (name,) in tables
        }
        self.names = Names()
        self.strings: dict[int, str] = {}
        if "StringIds" in self.columns:
            self.strings = dict(connection.execute("SELECT id, value FROM StringIds"))
        self.notes: list[Note] = []
        self.processes: dict[int, int] = {}
        self.name = functools.cache(
            lambda string: self.names.number(self.strings.get(string, "(no name)"))
        )

    def table(self) -> Table:
        self._note_absent()
        launches = self._launches()
        work = self._all_work()
        overhead = self._overhead()
        ends = [rows["end"].max() for rows in (launches, work) if len(rows)]
        ranges = self._ranges(int(max(ends)) if ends else None)
        if _RANGES in self.columns and "step" not in self.names.list:
            text = (
                f"no ranges of effasr in {self.path.name}, so neither steps nor phases: record "
                "with profiling/nsys_train.sh; nvtx 0.2.12 and later lose all before nsys 2024.1"
            )
            self.notes.append(Note("warning", text))
        self._note_diagnostics()
        # A file named after a rank may hold its helpers too: the rank is who has the work.
        busiest = int(np.bincount(work["process"]).argmax()) if len(work) else 0
        rank = rank_of(self.path)
        session = self.rows("TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": "0"})
        epoch = session[0][0] if session else 0
        processes = [
            Process(self.path.name, number >> 24 & 0xFFFFFF, rank if n == busiest else None, epoch)
            for n, number in enumerate(self.processes)
        ]
        return Table(
            self.names.list, processes, work, launches, ranges, overhead, self.notes, self._facts()
        )

    def rows(self, table: str, columns: dict[str, str], where: str = "") -> list[tuple]:
        """Return a table's rows; ``columns``: names, and the values for absent or NULL ones."""
        present = self.columns.get(table)
        if present is None:
            return []
        selected = ", ".join(
            f'coalesce("{name}", {default})' if name in present else default
            for name, default in columns.items()
        )
        condition = f" WHERE {where}" if where else ""
        return self.connection.execute(f'SELECT {selected} FROM "{table}"{condition}').fetchall()

    def process(self, identifier: int) -> int:
        return self.processes.setdefault(identifier & _PROCESS_MASK, len(self.processes))

    def _launches(self) -> np.ndarray:
        columns = {"start": "0", "end": "0", "globalTid": "0", "nameId": "-1", "correlationId": "0"}
        process, name = self.process, self.name
        return np.array(
            [
                (start, end, process(thread), thread, name(string), correlation)
                for start, end, thread, string, correlation in self.rows(_RUNTIME, columns)
            ],
            LAUNCH,
        )

    def _work(
        self, table: str, kind: Kind, name: Callable[..., int], more: dict[str, str]
    ) -> np.ndarray:
        """Return work of a device; its name follows from the values of the columns ``more``."""
        columns = dict.fromkeys(("start", "end", "globalPid", "deviceId", "streamId"), "0")
        columns |= {"correlationId": str(NONE), "graphNodeId": str(NONE), "bytes": "0"}
        process, name = self.process, functools.cache(name)
        return np.array(
            [
                (
                    *(start, end, process(pid), device, stream, name(*values), int(kind)),
                    *(correlation, node, size, NONE, 0),
                )
                for start, end, pid, device, stream, correlation, node, size, *values in (
                    self.rows(table, columns | more)
                )
            ],
            WORK,
        )

    def _all_work(self) -> np.ndarray:
        number, copy_kinds = self.names.number, ("copyKind", "srcKind", "dstKind")
        kernel = lambda long, short: self.name(short if long is None else long)
        work = [
            self._work(_KERNEL, Kind.KERNEL, kernel, {"demangledName": "NULL", "shortName": "-1"}),
            self._work(
                *(_COPY, Kind.COPY, lambda *kinds: number(_copy_name(*kinds))),
                dict.fromkeys(copy_kinds, "-1"),
            ),
            self._work(_FILL, Kind.FILL, lambda: number("Memset"), {}),
            self._work(
                *(_GRAPH, Kind.GRAPH, lambda graph: number(f"CUDA graph {graph} (whole)")),
                {"graphId": "0"},
            ),
        ]
        if graphs := len(work[-1]):
            self.notes.append(
                Note(
                    "warning",
                    f"{graphs} CUDA graphs were recorded whole, without their kernels: capture "
                    "with --cuda-graph-trace=node to see them",
                )
            )
        return np.concatenate(work)

    def _overhead(self) -> np.ndarray:
        columns = {"start": "0", "end": "0", "globalTid": "0"}
        rows = [row for table in _OVERHEADS for row in self.rows(table, columns)]
        return np.array(
            [(self.process(thread), start, end) for start, end, thread in rows], np.int64
        ).reshape(-1, 3)

    def _ranges(self, last: int | None) -> np.ndarray:
        columns = {"start": "0", "end": "NULL", "globalTid": "0"}
        columns |= dict.fromkeys(("text", "textId", "int64Value", "uint64Value"), "NULL")
        rows = self.rows(_RANGES, columns, f"eventType IN ({_PUSH_POP}, {_START_END})")
        if any(row[1] is None for row in rows):
            times = [t for row in rows for t in row[:2] if t is not None]
            last = max(times) if last is None else max(last, *times)
            count = sum(row[1] is None for row in rows)
            self.notes.append(
                Note("note", f"{count} ranges were still open at the end of the capture")
            )
        range_name = functools.cache(self._range_name)
        ranges = np.empty(len(rows), RANGE)
        for index, (start, end, thread, text, string, signed, unsigned) in enumerate(rows):
            if string is not None:
                text = self.strings.get(string, text)
            payload = signed if signed is not None else unsigned
            ranges[index] = (
                *(start, last if end is None else end, self.process(thread), thread),
                *range_name(text or "(no name)"),
                *(NONE if payload is None else min(payload, 2**62), NONE, 0),
            )
        link_by_sequence(ranges)
        return ranges

    def _range_name(self, text: str) -> tuple[int, bool, bool, int]:
        # The name ends where the first of the additions begins.
        cut = min((text.find(mark) for mark in (", seq = ", ", op_id = ", ", sizes = ")
                   if mark in text), default=len(text))  # fmt: skip
        match = _EMITTED.match(text, cut)
        sequence = int(match[1]) if match and match[1] else NONE
        name = text[:cut]
        is_backward = cut < len(text) and is_backward_name(name)
        is_op = is_backward or _OPERATOR.match(name) is not None
        return self.names.number(name), is_op, is_backward, sequence

    def _note_absent(self) -> None:
        meanings = {
            _KERNEL: "no kernel ran, or CUDA was not traced",
            _RUNTIME: "kernels cannot be traced back to ranges",
            _RANGES: "no ranges: kernels have no phase, steps are not known",
        }
        for table, meaning in meanings.items():
            if table not in self.columns:
                text = f"{self.path.name} has no table {table}: {meaning}"
                self.notes.append(Note("warning", text))
        if "TARGET_INFO_SYSTEM_ENV" in self.columns:
            self.notes.append(
                Note(
                    "note",
                    f"{self.path.name} holds the whole environment of the process, secrets "
                    "included: drop the table TARGET_INFO_SYSTEM_ENV before you publish it",
                )
            )

    def _note_diagnostics(self) -> None:
        columns = {"severity": "0", "text": "''"}
        for severity, text in dict.fromkeys(self.rows("DIAGNOSTIC_EVENT", columns)):
            if severity >= 3 or _LOST.search(text):
                self.notes.append(Note("warning", f"{self.path.name}: {' '.join(text.split())}"))

    def _facts(self) -> dict[str, str]:
        values: dict[str, str] = {}
        for table in ("EXPORT_META_DATA", "META_DATA_EXPORT"):
            values |= dict(self.rows(table, {"name": "''", "value": "''"}))
        version = values.get("EXPORT_PRODUCT_VERSION", "of unknown version")
        schema = values.get("EXPORT_SCHEMA_VERSION", "unknown")
        facts = {"profiler": f"Nsight Systems {version} (schema {schema})"}
        gpus = sorted({name for (name,) in self.rows("TARGET_INFO_GPU", {"name": "''"}) if name})
        if gpus:
            facts["GPU"] = ", ".join(gpus)
        return facts


def _copy_name(kind: int, source: int, target: int) -> str:
    name = f"Memcpy {_COPY_KINDS.get(kind, f'kind {kind}')}"
    if source in _MEMORY_KINDS and target in _MEMORY_KINDS:
        return f"{name} ({_MEMORY_KINDS[source]} -> {_MEMORY_KINDS[target]})"
    return name


def rank_of(path: Path) -> int | None:
    """Return the rank that a file's name gives, as in ``trace_rank3_p812.sqlite``."""
    match = re.search(r"rank[_-]?(\d+)", path.name)
    return int(match[1]) if match else None
