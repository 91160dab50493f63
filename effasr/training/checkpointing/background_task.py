"""A slow task that runs while training continues, one at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_UNNOTICED_S = 0.05


class Background:
    """Runs one job at a time in a daemon thread; its error is raised by the next call."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._what = ""
        self._error: BaseException | None = None
        self._waited = self._told = 0.0

    def start(self, what: str, job: Callable[[], object]) -> None:
        """Start a job after the previous one has ended."""
        self.wait()
        self._what = what
        self._thread = threading.Thread(target=self._run, args=(job,), daemon=True, name=what)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a job that has failed, without waiting."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self, reason: str = "") -> None:
        """Wait for the job."""
        if self._thread is None:
            return
        began = time.perf_counter()
        self._thread.join()
        seconds = time.perf_counter() - began
        self._waited += seconds if reason else 0.0
        if self._waited > max(_UNNOTICED_S, 2 * self._told):
            self._told = self._waited
            log.warning(
                "waited %.1f s, %.1f s in all, for %s: %s",
                seconds,
                self._waited,
                self._what,
                reason,
            )
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def linger(self, seconds: float) -> None:
        """Wait a limited time for the job, in a process that is about to be ended."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error
