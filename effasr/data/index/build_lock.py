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
"""How long a builder may be silent."""

_POLL_S = 0.2

_held: set[int] = set()
"""Descriptors of this process. A lock belongs to what a descriptor refers to, which a fork has as
well: it would keep the lock of a builder that was killed."""


def _forget_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class BuilderSilent(RuntimeError):
    """The process that builds has not said for long that it goes on."""


@contextmanager
def building(
    lock: Path, note: Callable[[str], None], patience_s: float = PATIENCE_S
) -> Iterator[Callable[[str], None]]:
    """Hold a lock, which the kernel drops with its process; wait while another one does.

    What that process reports is passed to ``note``.

    Where the file system has no locks, nothing is held.

    Yields:
        What to call with how far this process is: the others wait as long as that changes.

    Raises:
        BuilderSilent: It has said nothing for ``patience_s``.
        OSError: The file cannot be opened.
    """
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _held.add(descriptor)
    try:
        _wait(descriptor, lock, note, patience_s)
        name = f"{socket.gethostname()}, process {os.getpid()}"

        def say(text: str) -> None:
            content = f"{text} ({name})".encode()
            os.pwrite(descriptor, content, 0)
            os.ftruncate(descriptor, len(content))

        say("begins to read")
        yield say
        os.ftruncate(descriptor, 0)
    finally:
        # A forked child has none, nor does it end what its parent holds.
        if descriptor in _held:
            _held.discard(descriptor)
            os.close(descriptor)


def _wait(descriptor: int, lock: Path, note: Callable[[str], None], patience_s: float) -> None:
    said, changed = None, time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:
            log.debug("%s cannot be locked: %s", lock, error)
            return
        else:
            return
        now = os.pread(descriptor, 4096, 0)
        if now != said:
            said, changed = now, time.monotonic()
            if now:
                note(f"waiting for another process: {now.decode(errors='replace')}")
        elif time.monotonic() - changed > patience_s:
            raise BuilderSilent(
                f"{lock}: waited {patience_s:g} s for the process that reads the manifests, which "
                f"says nothing ({now.decode(errors='replace') or 'nor who it is'}): end it, or "
                "start with data.cache=null, with which every process reads for itself."
            )
        time.sleep(_POLL_S)
