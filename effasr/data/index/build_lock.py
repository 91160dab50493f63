"""Lets one process build a file while the others wait and log its progress."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

PATIENCE_S = 600.0
"""Default for how long a builder may go without a progress report, in seconds."""

_POLL_S = 0.2

_held: set[int] = set()
"""Descriptors that this process has locked. A fork shares the lock of an open file, so a child
must close its copies: it would otherwise hold the lock of a builder that was killed."""


def _forget_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class BuilderSilent(RuntimeError):
    """The process that builds the file has reported no progress for too long."""


@contextmanager
def building(
    lock: Path, note: Callable[[str], None], patience_s: float = PATIENCE_S
) -> Iterator[tuple[Callable[[str], None], bool]]:
    """Hold an exclusive file lock, which the kernel releases with the process.

    While another process holds the lock, wait and pass its progress reports to ``note``. Where the
    file system has no locks, nothing is locked.

    Yields:
        A function that publishes this process's progress (the others wait as long as it changes),
        and whether the file is locked.

    Raises:
        BuilderSilent: The other process has reported no progress for ``patience_s`` seconds.
        OSError: The file cannot be opened.
    """
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _held.add(descriptor)
    try:
        is_locked = _wait(descriptor, lock, note, patience_s)
        name = f"{socket.gethostname()}, process {os.getpid()}"

        def report_progress(text: str) -> None:
            content = f"{text} ({name})".encode()
            os.pwrite(descriptor, content, 0)
            os.ftruncate(descriptor, len(content))

        report_progress("begins to read")
        yield report_progress, is_locked
        os.ftruncate(descriptor, 0)
    finally:
        # A forked child has closed its copy already and must not release its parent's lock.
        if descriptor in _held:
            _held.discard(descriptor)
            os.close(descriptor)


def _wait(descriptor: int, lock: Path, note: Callable[[str], None], patience_s: float) -> bool:
    """Wait for the lock; return whether the file system has locks."""
    last_report, changed = None, time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:
            log.debug("%s cannot be locked: %s", lock, error)
            return False
        else:
            return True
        report = os.pread(descriptor, 4096, 0)
        if report != last_report:
            last_report, changed = report, time.monotonic()
            if report:
                note(f"waiting for another process: {report.decode(errors='replace')}")
        elif time.monotonic() - changed > patience_s:
            raise BuilderSilent(
                f"{lock}: waited {patience_s:g} s for the process that reads the manifests, which "
                f"reports nothing ({report.decode(errors='replace') or 'no name'}): end it, or "
                "start with data.cache=null, with which every process reads the manifests itself."
            )
        time.sleep(_POLL_S)
