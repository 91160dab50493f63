"""Tracks the phase of the step that this rank is in, for stall reports and the log."""

import time
from collections import deque
from collections.abc import Sequence

import torch

from effasr.data.batch import Batch

LOADING, WAITING, COMPUTING = "loading", "waiting for the others", "computing"


class PhaseTracker:
    """The step in progress, its phase, and the time that this rank spent on its own work.

    A rank's own time is the time to load its micro-batches and to compute until it first needs the
    other ranks; a slow rank has more of it. With fsdp2, ranks wait for each other in every layer,
    so that only loading distinguishes them.
    """

    def __init__(self, *, on_gpu: bool = False) -> None:
        self.step = 0  # Step in progress, counted from 1
        self.phase = "starting"  # Phase of the step
        self.since = time.monotonic()  # Start of the phase, by `time.monotonic`
        self.steps = 0  # Number of steps whose own time is known
        self.seconds = 0.0  # Total own time of these steps
        self._batches: Sequence[Batch] = ()
        self._on_gpu = on_gpu
        self._loading = 0.0
        self._mark: _Mark | None = None
        self._measured: deque[tuple[float, _Mark, _Mark]] = deque()

    def begin(self, phase: str, step: int | None = None, batches: Sequence[Batch] = ()) -> None:
        """Begin a phase of ``step``, by default of the same step, with these micro-batches."""
        now = time.monotonic()
        if self.phase == LOADING:
            self._loading = now - self.since
        self.phase, self.since, self._batches = phase, now, batches
        self.step = self.step if step is None else step

    def compute(self, batch: Batch) -> None:
        """Begin to compute a micro-batch; ranks have exchanged their counts before the first."""
        if self.phase != COMPUTING:
            self._mark = _Mark(on_gpu=self._on_gpu)
        self.phase, self.since, self._batches = COMPUTING, time.monotonic(), (batch,)

    def wait_for_ranks(self) -> None:
        """End this rank's own time of the step; later calls in the step have no effect."""
        if self._mark is None:
            return
        self._measured.append((self._loading, self._mark, _Mark(on_gpu=self._on_gpu)))
        self._mark = None
        while self._measured and self._measured[0][2].is_past:
            loading, begin, end = self._measured.popleft()
            self.seconds += loading + begin.until(end)
            self.steps += 1

    @property
    def utterances(self) -> Sequence[str]:
        return [name for batch in self._batches for name in batch.ids]


class _Mark:
    """A point in time: of the host, or in the queue of a GPU."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._time = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if on_gpu else None
        if self._event is not None:
            self._event.record()

    @property
    def is_past(self) -> bool:
        return self._event is None or self._event.query()

    def until(self, other: "_Mark") -> float:
        """Return the seconds to a later mark that has passed."""
        if self._event is None or other._event is None:
            return other._time - self._time
        return self._event.elapsed_time(other._event) / 1000
