"""Threads that wait for a peer in a call that nothing but the peer can end.

gloo offers a timeout, but one that passes closes the connections to all peers of the group. So a
thread that has waited too long is left where it is, and its peer with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Abandoned(Exception):
    """The thread has come back after all, and must end: others have gone on without it."""


class _Wait:
    """One of them."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.since = time.monotonic()


class Waits:
    """Who waits for whom, and since when."""

    def __init__(self) -> None:
        self._waits: list[_Wait] = []
        self._lock = threading.Lock()

    @contextmanager
    def on(self, peer: int) -> Iterator[None]:
        """While in it, the thread waits for ``peer``.

        Raises:
            Abandoned: It waited too long.
        """
        wait = _Wait(peer)
        with self._lock:
            self._waits.append(wait)
        try:
            yield
        finally:
            with self._lock:
                if wait not in self._waits:
                    raise Abandoned
                self._waits.remove(wait)

    def abandon(self, limit_s: float) -> list[int]:
        """Give up those that have waited for longer; the peers they wait for."""
        latest = time.monotonic() - limit_s
        with self._lock:
            long = [wait for wait in self._waits if wait.since < latest]
            self._waits = [wait for wait in self._waits if wait.since >= latest]
        return [wait.peer for wait in long]
