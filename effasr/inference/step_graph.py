"""A step of decoding as one CUDA graph: recorded once, then replayed without launching kernels."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], Tensor]
Capture = Callable[[Step], tuple[Callable[[], Any], Tensor]]

_WARM_UPS = 3
"""Runs before the recording: libraries choose algorithms and take workspaces in the first ones."""


class StepGraph:
    """Calls a function without arguments by replaying a recording of it.

    The function reads and writes tensors that stay where they are, and may not ask the device for a
    value. It runs a few times before it is recorded, so at first it must find a state in which that
    changes nothing.

    Args:
        step: What to record: returns a tensor.
        capture: Records a function without running it: returns what replays it, and its output.
    """

    def __init__(self, step: Step, capture: Capture | None = None) -> None:
        capture = _capture if capture is None else capture
        self._replay, self._output = capture(step)

    def __call__(self) -> Tensor:
        """Run the step; the next call writes over what this one returns."""
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
    # Other threads pin memory for coming batches meanwhile, which would break the recording if it
    # were not of this thread alone.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = step()
    return graph.replay, output


class Readback:
    """Brings the results of steps to the host in their order, some steps later.

    On a GPU the host never waits for a step unless it is so many steps ahead of it, for copies go
    to pinned memory behind the step that made them. Elsewhere there is nothing to wait for.

    Args:
        rows: Of each result.
        ahead: Steps that may be queued while the host reads the result of the one before them.
        device: Where the results come from.
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
        """Whether as many steps are queued as may be, so that the first must be read."""
        return len(self._queue) > self._ahead

    def put(self, result: Tensor, about: Any) -> None:
        """Begin to copy a result, int64 (rows,), with what belongs to it."""
        if self._pinned is None:
            self._queue.append((result.clone(), None, about))
            return
        buffer, event = self._pinned.popleft(), torch.cuda.Event()
        buffer.copy_(result, non_blocking=True)
        event.record()
        self._queue.append((buffer, event, about))

    def get(self) -> tuple[list[int], Any]:
        """Wait for the first result that has not been read."""
        buffer, event, about = self._queue.popleft()
        if event is not None and self._pinned is not None:
            event.synchronize()
            self._pinned.append(buffer)
        return buffer.tolist(), about
