"""Writes SQLite files as `nsys export` does, from the documented schema, for tests."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Nsight Systems User Guide, "SQLite Schema Reference": the columns of schema 3.20, in their order.
SCHEMA = {
    "StringIds": "id value",
    "META_DATA_EXPORT": "name value",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime localTime",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId "
    "returnValue callchainId",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start end deviceId contextId greenContextId streamId "
    "correlationId globalPid demangledName shortName mangledName launchType gridX gridY gridZ "
    "graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start end deviceId contextId streamId correlationId globalPid "
    "bytes copyKind srcKind dstKind graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start end deviceId contextId streamId correlationId globalPid "
    "value bytes graphNodeId",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start end deviceId contextId streamId correlationId "
    "globalPid graphId graphExecId",
    "NVTX_EVENTS": "start end eventType rangeId category color text globalTid endGlobalTid textId "
    "domainId uint64Value int64Value doubleValue uint32Value int32Value floatValue jsonTextId "
    "jsonText",
    "PROFILER_OVERHEAD": "start end globalTid nameId returnValue",
    "DIAGNOSTIC_EVENT": "timestamp timestampType source severity text globalPid",
    "TARGET_INFO_SYSTEM_ENV": "globalVid devStateName name value",
}
RUNTIME, KERNEL, COPY, FILL, GRAPH = (
    f"CUPTI_ACTIVITY_KIND_{name}"
    for name in ("RUNTIME", "KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
)
NVTX = "NVTX_EVENTS"


def thread_id(pid: int, tid: int) -> int:
    """The globalTid of a thread: one machine, process, thread."""
    return 1 << 48 | pid << 24 | tid


@dataclass
class Export:
    """Rows by table; tables without rows are left out, as nsys leaves them out."""

    pid: int = 100  # of the process whose rows are added
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    strings: dict[str, int] = field(default_factory=dict)
    correlation: int = 0

    def add(self, table: str, **values: Any) -> None:
        self.rows.setdefault(table, []).append(values)

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def range(
        self, name: str, start: int, end: int | None, *, tid: int = 100, registered: bool = False,
        payload: int | None = None, kind: int = 59,
    ) -> None:  # fmt: skip
        """Add an NVTX range: push/pop (59) or start/end (60)."""
        text = {"textId": self.string(name)} if registered else {"text": name}
        thread = {"globalTid": thread_id(self.pid, tid), "domainId": 0, "int64Value": payload}
        self.add(NVTX, **text, start=start, end=end, eventType=kind, **thread)

    def call(
        self, start: int, end: int, *, tid: int = 100, name: str = "cudaLaunchKernel_v7000"
    ) -> int:
        """Add a runtime call; returns its correlation id."""
        self.correlation += 1
        thread = {"globalTid": thread_id(self.pid, tid), "correlationId": self.correlation}
        self.add(RUNTIME, start=start, end=end, **thread, nameId=self.string(name))
        return self.correlation

    def work(
        self, table: str, start: int, end: int, correlation: int, *, stream: int = 7,
        device: int = 0, name: str = "void gemm<float>(float*)", **more: Any,
    ) -> None:  # fmt: skip
        """Add a kernel, copy, fill or graph."""
        if table == KERNEL:
            more |= {"demangledName": self.string(name), "shortName": self.string(name)}
        more |= {"correlationId": correlation, "globalPid": thread_id(self.pid, 0)}
        self.add(table, start=start, end=end, deviceId=device, streamId=stream, **more)

    def kernel(
        self, launch: int, start: int, end: int, name: str = "void gemm<float>(float*)", *,
        tid: int = 100, **more: Any,
    ) -> None:  # fmt: skip
        """Launch a kernel at ``launch``, for 2 ns on the host."""
        correlation = self.call(launch, launch + 2, tid=tid)
        self.work(KERNEL, start, end, correlation, name=name, **more)

    def write(
        self, path: Path, *, more_columns: Iterable[str] = (), without: Iterable[str] = ()
    ) -> Path:
        """Write the file, with columns before all others, as newer versions may have them."""
        self.add("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value="2025.3.1.90")
        rows = self.rows | {
            "StringIds": [{"id": number, "value": text} for text, number in self.strings.items()]
        }
        path.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as connection, connection:
            for table, content in rows.items():
                columns = [name for name in SCHEMA[table].split() if name not in set(without)]
                columns = [*more_columns, *columns] if table != "StringIds" else columns
                listed = ", ".join(f'"{name}"' for name in columns)
                connection.execute(f'CREATE TABLE "{table}" ({listed})')
                marks = ", ".join("?" * len(columns))
                connection.executemany(
                    f'INSERT INTO "{table}" VALUES ({marks})',
                    [[row.get(name) for name in columns] for row in content],
                )
        return path
