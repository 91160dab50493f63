"""Requests to stop by signals: at the end of a step, or at once in phases that make no steps."""

import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

from effasr.data import worker_processes
from effasr.distributed.process_group import DistributedContext

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

_POLL_S = 0.25
_KEY = "stop"


class StopInterrupt(BaseException):
    """Ends a phase that makes no steps, such as a validation; nothing may catch it as an error."""


@dataclass(slots=True)
class StopRequest:
    """Records the signal by which this process was asked to stop, if any, and its last moment."""

    received: signal.Signals | None = None
    deadline: float = math.inf  # Of time.monotonic()
    # Gets the number of each signal at once, also while the main thread waits in a collective call.
    wakeup: socket.socket | None = None
    _interrupts: bool = False

    def __bool__(self) -> bool:
        return self.received is not None or self.is_late

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self.deadline

    def note(self, number: int) -> None:
        if number != signal.SIGALRM:
            self.received = signal.Signals(number)
        if self._interrupts:
            self._interrupts = False
            raise StopInterrupt

    @contextmanager
    def interrupting(self, context: DistributedContext) -> Iterator[None]:
        """Raise StopInterrupt in the block, within a second, when a rank is asked to stop."""
        try:
            with self._watching(context):
                self._interrupts = True
                # Not before: a signal between the two would be noted, but interrupt nothing.
                if self:
                    self._interrupts = False
                    raise StopInterrupt
                yield
        except StopInterrupt:
            _tell(context)
            raise
        except RuntimeError as error:
            if self or _is_told(context):  # Another rank has left first.
                raise StopInterrupt from error
            raise
        finally:
            self._interrupts = False

    @contextmanager
    def _watching(self, context: DistributedContext) -> Iterator[None]:
        """Exchange requests with other ranks in the block, whatever the main thread does."""
        ended = threading.Lock()  # held from the end of the block on, and to send a signal before
        watcher = threading.Thread(target=self._watch, args=(context, ended), daemon=True)
        if context.store is not None and self.wakeup is not None:
            watcher.start()
        try:
            yield
        finally:
            ended.acquire()

    def _watch(self, context: DistributedContext, ended: threading.Lock) -> None:
        """Tell other ranks of a signal, and turn the request of one into a signal to this one."""
        assert self.wakeup is not None
        # The store is gone with its process, or the block has ended meanwhile.
        with suppress(RuntimeError, OSError, ValueError):
            store = context.store.clone()  # type: ignore[union-attr]
            while not ended.locked():
                readable, _, _ = select.select([self.wakeup], [], [], _POLL_S)
                if readable and not {*SIGNALS, signal.SIGALRM}.isdisjoint(self.wakeup.recv(4096)):
                    store.set(_KEY, "")
                    return
                if store.check([_KEY]):
                    # After the block nothing may be left that handles the signal.
                    if ended.acquire(blocking=False):
                        os.kill(os.getpid(), signal.SIGTERM)
                        ended.release()
                    return

    def gather(self, context: DistributedContext, compute: Callable[[], T]) -> list[T]:
        """Return what each rank computes; StopInterrupt on all ranks if one was interrupted."""
        part: tuple[T] | None = None
        with suppress(StopInterrupt), self.interrupting(context):
            part = (compute(),)
        with self._watching(context):
            parts = context.all_gather(part)
        whole = [part[0] for part in parts if part is not None]
        if len(whole) < len(parts):
            raise StopInterrupt
        return whole


def _tell(context: DistributedContext) -> None:
    if context.store is not None:
        with suppress(RuntimeError):
            context.store.set(_KEY, "")


def _is_told(context: DistributedContext) -> bool:
    with suppress(RuntimeError):
        return context.store is not None and context.store.check([_KEY])
    return False


@contextmanager
def listening(limit_s: float | None = None) -> Iterator[StopRequest]:
    """Turn signals and a limit of time into a request to stop; a second SIGINT interrupts at once.

    Child processes (data workers) keep the default for SIGTERM and ignore the others, which a
    terminal or a batch system sends to all of them. Outside the main thread, signals are ignored
    here. Processes that torchrun started are asked to stop when it is killed.
    """
    request = StopRequest()
    if limit_s is not None:
        request.deadline = time.monotonic() + limit_s
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
        request.note(number)

    numbers = SIGNALS if limit_s is None else (*SIGNALS, signal.SIGALRM)
    previous = {number: signal.signal(number, note) for number in numbers}
    request.wakeup, written = socket.socketpair()
    for end in (request.wakeup, written):
        end.setblocking(False)
    descriptor = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
    timer = None if limit_s is None else signal.setitimer(signal.ITIMER_REAL, limit_s)
    if previous[signal.SIGHUP] is signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        worker_processes.signal_at_death_of_parent(signal.SIGTERM)
    try:
        yield request
    finally:
        signal.set_wakeup_fd(descriptor)
        request.wakeup.close()
        written.close()
        if timer is not None:
            signal.setitimer(signal.ITIMER_REAL, *timer)
        for number, handler in previous.items():
            signal.signal(number, handler)
