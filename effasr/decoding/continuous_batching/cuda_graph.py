"""A decoding step as a CUDA graph, and asynchronous copies of its results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], Tensor]
Capture = Callable[[Step], tuple[Callable[[], Any], Tensor]]

_WARM_UPS = 3  # runs before capture, in which libraries choose algorithms and allocate workspaces


class StepGraph:
    """Replays a captured function without arguments.

    The function reads and writes tensors at fixed addresses, and may not synchronize with the
    device. It runs a few times before capture, so the state at that time must make it harmless.
    """

    def __init__(self, step: Step, capture: Capture | None = None) -> None:
        capture = _capture if capture is None else capture
        self._replay, self._output = capture(step)

    def __call__(self) -> Tensor:
        """Run the step; the next call overwrites the result."""
        self._replay()
        return self._output


def _capture(step: Step) -> tuple[Callable[[], Any], Tensor]:
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UPS):
            step()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # Other threads pin memory for later batches meanwhile, which would invalidate a capture that
    # covers all threads.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = step()
    return graph.replay, output


class Readback:
    """Copies the results of steps to the host in order, some steps later.

    On a GPU the host waits only when it is ``ahead`` steps ahead of the device, because each result
    is copied to pinned memory behind its step. On a CPU there is nothing to wait for.
    """

    def __init__(self, rows: int, ahead: int, device: torch.device) -> None:
        self._ahead = ahead
        self._queue: deque[tuple[Tensor, torch.cuda.Event | None, Any]] = deque()
        self._pinned: deque[Tensor] | None = None
        if device.type == "cuda":
            pinned = torch.empty(ahead + 1, rows, dtype=torch.int64, pin_memory=True)
            self._pinned = deque(pinned)

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def due(self) -> bool:
        """Whether the queue is full, so that the first result must be read."""
        return len(self._queue) > self._ahead

    def put(self, result: Tensor, about: Any) -> None:
        """Start to copy a result, int64 (rows,), with the data that belongs to it."""
        if self._pinned is None:
            self._queue.append((result.clone(), None, about))
            return
        buffer, event = self._pinned.popleft(), torch.cuda.Event()
        buffer.copy_(result, non_blocking=True)
        event.record()
        self._queue.append((buffer, event, about))

    def get(self) -> tuple[list[int], Any]:
        """Wait for the oldest unread result."""
        buffer, event, about = self._queue.popleft()
        if event is not None and self._pinned is not None:
            event.synchronize()
            self._pinned.append(buffer)
        return buffer.tolist(), about
