"""Requests to stop by signals, which take effect at the end of a step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class StopRequest:
    """Records the signal by which this process was asked to stop, if any."""

    received: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.received is not None


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Turn SIGTERM and the first SIGINT into a request; a second SIGINT interrupts at once.

    Child processes (data workers) keep the default for SIGTERM and ignore SIGINT, which a terminal
    sends to all of them. Outside the main thread, signals are ignored here.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    owner = os.getpid()

    def note(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        if number == signal.SIGINT and request.received is signal.SIGINT:
            raise KeyboardInterrupt
        request.received = signal.Signals(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
