"""Ends what a suite has started, also where the suite itself was killed.

Every process that the suite starts has a token in its environment, which all that it starts in turn
inherit, in whatever group or session. `Watcher` starts this file as a process of its own, which
waits for the suite's end of a pipe to close, and then kills what bears the token.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

VARIABLE = "EFFASR_SUITE_TOKEN"
_ROUNDS = 20
"""Searches for processes that were started while others were being killed."""


def new_token() -> str:
    """Return a name that no other process has."""
    return uuid.uuid4().hex


def marked(token: str, variable: str = VARIABLE) -> Iterator[int]:
    """Yield the processes with this token in a variable, this one and zombies excepted."""
    wanted = f"{variable}={token}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # Gone meanwhile, or somebody else's.
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def kill(token: str, variable: str = VARIABLE) -> int:
    """Kill all processes with this token in a variable; returns how many there were."""
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        found = list(marked(token, variable))
        if not found:
            break
        for number in found:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        killed.update(found)
        time.sleep(0.05)
    return len(killed)


class Watcher:
    """Kills what bears a token once this process is gone, however it ends."""

    def __init__(self, token: str) -> None:
        """Start to watch."""
        command = [sys.executable, "-S", "-E", __file__, token]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        """Kill now what is left."""
        self._process.communicate()


def main() -> None:
    """Wait for the end of the input, which nobody writes to."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    kill(sys.argv[1])


if __name__ == "__main__":
    main()
