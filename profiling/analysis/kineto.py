"""Reads the trace that torch.profiler exports: Chrome's JSON, as Kineto writes it, also as .gz.

An event at a time, so that a large trace needs little more memory than its text. A file is one
process: on it, the device's events bear the device as their process.
"""

import gc
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from analysis.nsys import rank_of
from analysis.table import (
    LAUNCH,
    NONE,
    RANGE,
    WORK,
    Kind,
    Names,
    Nest,
    Note,
    Process,
    Table,
    is_backward_name,
    link_by_flow,
    link_by_sequence,
)

_KINDS = {
    "kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY,
    "gpu_memset": Kind.FILL,
    # Of old versions.
    "Kernel": Kind.KERNEL,
    "Memcpy": Kind.COPY,
    "Memset": Kind.FILL,
}
_CALLS = {"cuda_runtime", "cuda_driver", "Runtime"}
_OPERATORS = {"cpu_op", "Operator"}
_ANNOTATIONS = {"user_annotation", "UserAnnotation"}
_EXCHANGES = ("gloo:", "mpi:", "ucc:")
_UNPACKED_TIMES, _UNPACKED_BYTES = 200, 1 << 24
"""A trace unpacks to 10 to 30 times its size; what unpacks to more than this is none."""
_SPACE = re.compile(r"[\s,]*")
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
MARK = "written by profiling/report.py"
"""Marks a trace written by the report itself, which is not an input."""


def read(path: Path) -> Table:
    text = _text(path)
    reader = _Reader(path)
    try:
        with _no_collection():
            head, events = _parts(text, path)
            for event in events:
                reader.add(event)
            return reader.table(head)
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(
            f"`{path}` must be a trace of torch.profiler, but has events of another form "
            f"({type(error).__name__}: {str(error)[:200]}): export it again."
        ) from error


def _text(path: Path) -> str:
    content = path.read_bytes()
    try:
        if content[:2] == b"\x1f\x8b":
            most = _UNPACKED_TIMES * len(content) + _UNPACKED_BYTES
            with gzip.open(io.BytesIO(content)) as file:
                content = file.read(most + 1)
            if len(content) > most:
                raise ValueError(
                    f"`{path}` must be a trace, but unpacks to more than {_UNPACKED_TIMES} times "
                    "its size."
                )
        return content.decode("utf-8", "replace")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"`{path}` must be a whole .gz file, but {error}: was the trace still being written?"
        ) from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without cyclic garbage collection, which costs more than reading; nothing here is cyclic."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _parts(text: str, path: Path) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    if text.lstrip()[:1] == "[":
        # Chrome's array form, which may be cut off.
        return {}, _events(text, text.index("[") + 1, path, [])
    match = _EVENTS.search(text)
    if match is None:
        raise ValueError(
            f"`{path}` must be a trace of torch.profiler, but has no list traceEvents: write one "
            "with `export_chrome_trace`."
        )
    ends: list[int] = []

    def events() -> Iterator[dict[str, Any]]:
        yield from _events(text, match.end(), path, ends)
        try:
            head.update(json.loads(text[: match.end()] + text[ends[0] :]))
        except json.JSONDecodeError as error:
            raise _damaged(path, error) from error

    head: dict[str, Any] = {}
    return head, events()


def _events(text: str, at: int, path: Path, ends: list[int]) -> Iterator[dict[str, Any]]:
    # Times as they are written: a float holds no nanoseconds of a clock that began in 1970.
    scan = json.JSONDecoder(parse_float=str).raw_decode
    skip = _SPACE.match
    while True:
        at = skip(text, at).end()  # type: ignore[union-attr]
        if text[at : at + 1] == "]":
            ends.append(at)
            return
        try:
            event, at = scan(text, at)
        except json.JSONDecodeError as error:
            raise _damaged(path, error) from error
        # Arrows from launches to kernels say what correlation ids say.
        if isinstance(event, dict) and event.get("cat") != "ac2g":
            yield event


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"`{path}` must be a whole trace, but its JSON ends or breaks off ({error}): was it still "
        "being written?"
    )


def nanoseconds(time: str | int) -> int:
    if isinstance(time, int):
        return time * 1000
    if time[-4:-3] == "." and time[-3:].isdecimal():
        # As Kineto writes all of them.
        return int(time[:-4] + time[-3:])
    whole, _, fraction = time.partition(".")
    if fraction.isdecimal() or not fraction:
        try:
            sign = -1 if whole.startswith("-") else 1
            return int(whole) * 1000 + sign * int((fraction + "000")[:3])
        except ValueError:
            pass
    return round(Decimal(time) * 1000)


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.names = Names()
        self.work: list[tuple] = []
        self.launches: list[tuple] = []
        self.ranges: list[tuple] = []
        self.overhead: list[tuple[int, int, int]] = []
        self.flows: tuple[dict, dict] = ({}, {})
        self.called: dict[int, tuple[int, int]] = {}
        self.external: list[int] = []
        self.pids: dict[int, int] = {}
        self.is_truncated = False

    def add(self, event: dict[str, Any]) -> None:
        phase, category = event.get("ph"), event.get("cat")
        if phase == "X":
            if category in _KINDS:
                self._add_work(event, _KINDS[category])
            elif category in _CALLS:
                self._add_launch(event)
            elif category in _OPERATORS or category in _ANNOTATIONS:
                self._add_range(event, category in _OPERATORS)
            elif category == "overhead":
                self.overhead.append((0, *_span(event)))
        elif category == "fwdbwd" and phase in ("s", "f"):
            key = (_number(event["tid"]), nanoseconds(event["ts"]))
            self.flows[phase == "f"][event["id"]] = key

    def table(self, head: dict[str, Any]) -> Table:
        if head.get("producer") == MARK:
            raise ValueError(
                f"`{self.path}` must be the trace of a profiler, but is one that a report wrote: "
                "name the capture that the report was made from."
            )
        ranges = np.array(self.ranges, RANGE)
        link_by_flow(ranges, *self.flows)
        link_by_sequence(ranges)
        work = np.array(self.work, WORK)
        launches = np.array(self.launches, LAUNCH)
        if len(work):
            self._place_external(work, launches)
        else:
            work = operator_work(ranges)
        epoch = head.get("baseTimeNanoseconds", 0)
        pid = max(self.pids, key=lambda pid: self.pids[pid]) if self.pids else 0
        rank = head.get("distributedInfo", {}).get("rank")
        rank = rank if isinstance(rank, int) else rank_of(self.path)
        return Table(
            self.names.list,
            [Process(self.path.name, pid, rank, epoch)],
            work,
            launches,
            ranges,
            np.array(self.overhead, np.int64).reshape(-1, 3),
            self._notes(work),
            _facts(head),
        )

    def _add_work(self, event: dict[str, Any], kind: Kind) -> None:
        get = event.get("args", {}).get
        self.external.append(get("External id", get("external id", NONE)))
        self.work.append(
            (
                *(*_span(event), 0, get("device", 0), _number(get("stream", 0))),
                *(self.names.number(str(event["name"])), int(kind), get("correlation", NONE)),
                *(_number(get("graph node id", NONE)), _number(get("bytes", 0)), NONE, 0),
            )
        )

    def _add_launch(self, event: dict[str, Any]) -> None:
        name = self.names.number(str(event["name"]))
        correlation = event.get("args", {}).get("correlation", NONE)
        self.launches.append((*_span(event), 0, _number(event["tid"]), name, correlation))

    def _add_range(self, event: dict[str, Any], is_op: bool) -> None:
        start, end = _span(event)
        thread, text = _number(event["tid"]), str(event["name"])
        # Exchanges on the CPU run on threads of their own, marked as a user would mark them.
        is_op = is_op or text.startswith(_EXCHANGES)
        get = event.get("args", {}).get
        # A forward thread is named by the backward operators only.
        is_backward = is_op and (get("Fwd thread id", 0) != 0 or is_backward_name(text))
        sequence = get("Sequence number", NONE)
        self.ranges.append(
            (
                *(start, end, 0, thread, self.names.number(text), is_op, is_backward),
                *(sequence, NONE, NONE, 0),
            )
        )
        external = get("External id", get("external id"))
        if external is not None:
            self.called[external] = (thread, start)
        pid = event.get("pid")
        if isinstance(pid, int):
            self.pids[pid] = self.pids.get(pid, 0) + 1

    def _place_external(self, work: np.ndarray, launches: np.ndarray) -> None:
        """Attribute kernels without a launch record to the operator of their external id."""
        lost = np.flatnonzero(~np.isin(work["correlation"], launches["correlation"]))
        for index in lost.tolist():
            position = self.called.get(self.external[index])
            if position is not None:
                work["thread"][index], work["called"][index] = position

    def _notes(self, work: np.ndarray) -> list[Note]:
        name = self.path.name
        if not len(work):
            return [Note("warning", f"{name} holds neither kernels nor operators")]
        if work["kind"][0] == Kind.OPERATOR:
            text = f"{name} has no GPU: operators on the CPU are counted as the work"
            return [Note("note", text)]
        if not self.launches:
            text = f"{name} has no CUDA calls: kernels have no launch to go by"
            return [Note("warning", text)]
        return []


def _span(event: dict[str, Any]) -> tuple[int, int]:
    start = nanoseconds(event["ts"])
    return start, start + max(nanoseconds(event.get("dur", 0)), 0)


def _number(value: Any) -> int:
    """Return a thread, stream or count; what is no number gets one of its own."""
    if isinstance(value, int):
        return value
    try:
        return int(value)
    except (TypeError, ValueError):
        return -2 - zlib.crc32(str(value).encode())


def _facts(head: dict[str, Any]) -> dict[str, str]:
    facts = {"profiler": f"torch.profiler (Kineto, schema {head.get('schemaVersion', 'unknown')})"}
    gpus = {str(device.get("name", "unknown")) for device in head.get("deviceProperties") or []}
    if gpus:
        facts["GPU"] = ", ".join(sorted(gpus))
    if "cuda_driver_version" in head:
        facts["CUDA driver"] = str(head["cuda_driver_version"])
    return facts


# On a trace without a GPU, operators are the work: each counts while none inside it runs.


def operator_work(ranges: np.ndarray) -> np.ndarray:
    """Return the time in which each operator itself runs, without those that it calls."""
    rows = np.flatnonzero(ranges["is_op"])
    nest, pieces = Nest(ranges, rows), [np.zeros((3, 0), np.int64)]
    for thread in np.unique(ranges["thread"][rows]):
        chosen = ranges[rows[ranges["thread"][rows] == thread]]
        # At every edge the innermost operator is the last that began and has not ended.
        edges = np.unique(np.concatenate([chosen["start"], chosen["end"]]))
        begins, stops = edges[:-1], edges[1:]
        where = np.zeros_like(begins), np.full_like(begins, thread)
        stretches = np.stack([nest.find(*where, begins, stops), begins, stops])
        inner, begins, stops = stretches = stretches[:, stretches[0] >= 0]
        # Stretches of one operator that follow on one another are one.
        first = np.append(True, (inner[1:] != inner[:-1]) | (begins[1:] != stops[:-1]))[
            : len(inner)
        ]
        last = np.append(first[1:], True)[: len(inner)]
        pieces.append(np.stack([inner[first], begins[first], stops[last]]))
    index, begin, end = np.concatenate(pieces, axis=1)
    result = np.zeros(len(index), WORK)
    result["start"], result["end"], result["correlation"] = begin, end, index
    result["device"] = result["graph_node"] = NONE
    result["kind"] = Kind.OPERATOR
    for name in ("process", "thread", "name"):
        result[name] = ranges[name][index]
    result["stream"], result["called"] = result["thread"], ranges["start"][index]
    return result
