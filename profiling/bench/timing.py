"""A clock: events on a GPU, wall time on a CPU."""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_FLUSHED_BYTES = 256 * 2**20
_LONGEST_SLEEP_S = 0.02
_SLEEP_CYCLES_PER_S = 2e9


class OutOfTime(BaseException):
    """A case took longer than it may. No `Exception`, which a compiler might swallow."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the block after so long; in the main thread of a POSIX system alone.

    What waits inside C code is interrupted when it returns.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() != threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise OutOfTime(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Timing:
    """Result of `measure`.

    Attributes:
        p20: 20th percentile, in milliseconds.
        p50: Median.
        p80: 80th percentile.
        host: Milliseconds until the host has launched everything; median. On a CPU as `p50`.
        peak_bytes: The most memory during a call, beyond what was there before; None on a CPU.
    """

    p20: float
    p50: float
    p80: float
    host: float
    peak_bytes: int | None


def measure(
    call: Callable[[], object],
    device: torch.device,
    *,
    repeats: int,
    warmup: int = 3,
    seconds: float = 2.0,
    least: int = 3,
) -> Timing:
    """Time a call: warm up, then repeat it until there are enough, or the time is over.

    On a GPU each repeat finds the L2 cache full of something else. The GPU first sleeps while the
    host launches, so that gaps between launches do not count: a training step runs in a CUDA graph,
    which has none. How long the host takes is told on its own.

    Args:
        call: Function to time; its result is dropped at once.
        device: Device that computes.
        repeats: Largest number of repeats.
        warmup: Number of calls before the measurement.
        seconds: Approximate duration of the measurement.
        least: Least number of repeats, even if they take longer.
    """
    for _ in range(warmup):
        call()
    if device.type != "cuda":
        return _measure_cpu(call, repeats, seconds, least)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    call()
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    flush = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device)
    sleep = round(min(1.5 * host, _LONGEST_SLEEP_S) * _SLEEP_CYCLES_PER_S)
    hosts, events = [], []
    deadline = time.perf_counter() + seconds
    while len(events) < least or (len(events) < repeats and time.perf_counter() < deadline):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(sleep)
        begin = time.perf_counter()
        start.record()
        call()
        end.record()
        hosts.append(1e3 * (time.perf_counter() - begin))
        # Before the next one, so that the allocator gives the same blocks again.
        end.synchronize()
        events.append(start.elapsed_time(end))
    return Timing(*_percentiles(events), statistics.median(hosts), peak)


def _measure_cpu(call: Callable[[], object], repeats: int, seconds: float, least: int) -> Timing:
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < least or (len(times) < repeats and time.perf_counter() < deadline):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    p20, p50, p80 = _percentiles(times)
    return Timing(p20, p50, p80, p50, None)


def _percentiles(times: list[float]) -> tuple[float, float, float]:
    if len(times) == 1:
        return times[0], times[0], times[0]
    p20, _, _, p80 = statistics.quantiles(times, n=5, method="inclusive")
    return p20, statistics.median(times), p80
