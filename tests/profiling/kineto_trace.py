"""Writes traces as Kineto does on a GPU, for tests: times are in ns here, in µs there."""

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAIN, AUTOGRAD = 100, 177


@dataclass
class Trace:
    """Events of one process; ``head`` stands beside them."""

    head: dict[str, Any] = field(default_factory=lambda: {"schemaVersion": 1})
    events: list[dict[str, Any]] = field(default_factory=list)
    count: int = 0

    def span(
        self, category: str, name: str, start: int, end: int, tid: Any = MAIN, **more: Any
    ) -> None:
        """Add an event with a duration; ``more`` are its arguments."""
        event = {"ph": "X", "cat": category, "name": name, "pid": 100, "tid": tid, "args": more}
        self.events.append(event | {"ts": start / 1000, "dur": (end - start) / 1000})

    def note(self, name: str, start: int, end: int, tid: int = MAIN) -> None:
        """Add a range of the user."""
        self.span("user_annotation", name, start, end, tid)

    def operator(
        self, name: str, start: int, end: int, tid: int = MAIN, *, sequence: int | None = None,
        forward_thread: int = 0,
    ) -> int:  # fmt: skip
        """Add an operator; returns its external id."""
        self.count += 1
        more: dict[str, Any] = {"External id": self.count}
        if sequence is not None:
            more |= {"Sequence number": sequence, "Fwd thread id": forward_thread}
        self.span("cpu_op", name, start, end, tid, **more)
        return self.count

    def flow(self, number: int, begin: tuple[int, int], end: tuple[int, int]) -> None:
        """Add an arrow from a forward operator (thread, time) to a backward one."""
        for phase, (tid, time) in (("s", begin), ("f", end)):
            event = {"ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": 100}
            self.events.append(event | {"tid": tid, "ts": time / 1000})

    def kernel(
        self, launch: int | None, start: int, end: int, name: str = "gemm", *, tid: int = MAIN,
        stream: int = 7, category: str = "kernel", external: int = 0,
    ) -> None:  # fmt: skip
        """Add a kernel and, unless ``launch`` is None, its launch of 2 ns."""
        self.count += 1
        if launch is not None:
            self.span(
                "cuda_runtime", "cudaLaunchKernel", launch, launch + 2, tid, correlation=self.count
            )
        more = {"device": 0, "stream": stream, "correlation": self.count, "External id": external}
        self.span(category, name, start, end, stream, **more)

    def write(self, path: Path) -> Path:
        """Write the trace; compressed, where the name ends in .gz."""
        text = json.dumps(self.head | {"traceEvents": self.events}, indent=2)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path
