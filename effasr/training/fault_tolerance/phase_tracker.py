"""What this rank is doing: noted in passing, and put into words only when something is wrong."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from effasr.data.batch import Batch

LOADING, WAITING, COMPUTING = "loading", "waiting for the others", "computing"


class Activity:
    """The step that is under way, and how much of its time is this rank's own.

    Its own is what it needs to load its micro-batches and to compute until it first needs the
    others; then it may wait for them. A rank that is slow has more of it than the others. With
    fsdp2, ranks wait for each other in every layer, so that only loading tells them apart.

    Args:
        on_gpu: Whether the device tells when it computes; it is never waited for.

    Attributes:
        step: Counted from 1.
        phase: What is done in it.
        since: When the phase began, by `time.monotonic`.
        steps: Steps whose time is known.
        seconds: Of its own in all of these.
    """

    def __init__(self, *, on_gpu: bool = False) -> None:
        self.step = 0
        self.phase = "starting"
        self.since = time.monotonic()
        self.steps = 0
        self.seconds = 0.0
        self._batches: Sequence[Batch] = ()
        self._on_gpu = on_gpu
        self._loading = 0.0
        self._mark: _Mark | None = None
        self._measured: deque[tuple[float, _Mark, _Mark]] = deque()

    def begin(self, phase: str, step: int | None = None, batches: Sequence[Batch] = ()) -> None:
        """Begin a phase, of the same step by default, with these micro-batches in hand."""
        now = time.monotonic()
        if self.phase == LOADING:
            self._loading = now - self.since
        self.phase, self.since, self._batches = phase, now, batches
        self.step = self.step if step is None else step

    def compute(self, batch: Batch) -> None:
        """A micro-batch comes next; before the first one, ranks have exchanged their counts."""
        if self.phase != COMPUTING:
            self._mark = _Mark(on_gpu=self._on_gpu)
        self.phase, self.since, self._batches = COMPUTING, time.monotonic(), (batch,)

    def meet(self) -> None:
        """From here on this rank may wait for the others; only the first time in a step counts."""
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
        """Those of the micro-batches in hand."""
        return [name for batch in self._batches for name in batch.ids]


class _Mark:
    """A moment: of the host, or of a GPU, which reaches it later."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._time = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if on_gpu else None
        if self._event is not None:
            self._event.record()

    @property
    def is_past(self) -> bool:
        return self._event is None or self._event.query()

    def until(self, other: _Mark) -> float:
        """Seconds to a later one that is past."""
        if self._event is None or other._event is None:
            return other._time - self._time
        return self._event.elapsed_time(other._event) / 1000
