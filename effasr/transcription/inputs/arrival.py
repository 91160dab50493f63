"""Audio that arrives while it is transcribed: stalled sources, and signals that end it."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Self, TypeVar

T = TypeVar("T")

_STALL_S = 1.0  # without samples for so long, a sentence is over
_AHEAD = 1000  # blocks that may wait, some minutes; then the recorder is blocked
_SIGNALS = signal.SIGINT, signal.SIGTERM


class Interruption:
    """SIGINT and SIGTERM: the first ends the input, so that all decoded text is written.

    A second one ends the process as if there were none of this.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}
        self._calls: list[Callable[[], None]] = []

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the signal handler: it must not take a lock."""
        self._calls.append(function)

    def __enter__(self) -> Self:
        # Other threads cannot set handlers; shells start background jobs with SIGINT ignored.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if (before := signal.getsignal(number)) != signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        self.__exit__()
        for function in self._calls:
            function()


def arriving(blocks: Iterable[T], interruption: Interruption | None = None) -> Iterator[T | None]:
    """Yield the same blocks, read on a thread; None where none has come for a second."""
    # Its `put` may be called by a signal handler, in the midst of another call.
    queue: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()  # None: the end
    room = threading.Semaphore(_AHEAD)

    def read() -> None:
        try:
            for block in blocks:
                room.acquire()
                queue.put((block,))
        except BaseException as error:
            queue.put(error)
        queue.put(None)

    if interruption is not None:
        interruption.call(lambda: queue.put(None))
        if interruption.requested:
            return
    # A daemon: nothing can end the wait for a recorder that sends nothing.
    threading.Thread(target=read, name="arriving", daemon=True).start()
    stalled = True
    while True:
        try:
            item = queue.get(timeout=None if stalled else _STALL_S)
        except Empty:
            stalled = True
            yield None
            continue
        if item is None:
            return
        if isinstance(item, BaseException):
            raise item
        room.release()
        stalled = False
        yield item[0]
