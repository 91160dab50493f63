"""Tracks the remaining neighbours and the errors of the threads that exchange with them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)


class Peers:
    """The neighbours of one learner; ``on_lost`` is called once per lost one, from any thread."""

    def __init__(
        self,
        learner: int,
        neighbours: Sequence[int],
        on_lost: Callable[[int], None] | None,
    ) -> None:
        self.learner = learner
        self._living = tuple(neighbours)
        self._lost: tuple[int, ...] = ()
        self._on_lost = on_lost
        self._error: Exception | None = None
        self._ended = False
        self._lock = threading.Lock()

    @property
    def living(self) -> tuple[int, ...]:
        """Remaining neighbours, in ascending order."""
        return self._living

    @property
    def lost(self) -> tuple[int, ...]:
        """Lost neighbours, in the order of their loss."""
        return self._lost

    def lose(self, peer: int, reason: str) -> None:
        """Mark a neighbour as lost, and log the reason."""
        with self._lock:
            if peer in self._lost or self._ended:
                return
            self._living = tuple(other for other in self._living if other != peer)
            self._lost += (peer,)
        left = ", ".join(map(str, self._living))
        several = "s" if len(self._living) > 1 else ""
        log.warning(
            "learner %d lost learner %d, and %s: %s",
            self.learner,
            peer,
            f"continues with learner{several} {left}" if left else "has no other: continues alone",
            reason,
        )
        if self._on_lost is not None:
            self._on_lost(peer)

    def end(self) -> None:
        """Ignore later losses of neighbours, because this learner ends its exchanges."""
        with self._lock:
            self._ended = True

    def fail(self, peer: int | None, error: Exception) -> None:
        """Store the first error of a thread for `check`."""
        with self._lock:
            if self._error is None:
                partner = "" if peer is None else f" with learner {peer}"
                failure = RuntimeError(
                    f"the exchange of learner {self.learner}{partner} failed: "
                    f"{type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                self._error = failure

    def check(self) -> None:
        """Raise the stored error, if any."""
        if self._error is not None:
            raise self._error
