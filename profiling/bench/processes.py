"""Runs a command in a separate process group with a time limit, and ends all it started."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KEPT_LINES = 5_000
_GRACE_S = 5.0
"""Seconds from the request to end to the end."""


@dataclass(frozen=True)
class Ended:
    """Outcome of a command.

    Attributes:
        code: Exit code, negative for a signal; None if it was ended at its time limit.
        seconds: Duration in seconds.
        lines: Last lines of its output, stdout and stderr together.
    """

    code: int | None
    seconds: float
    lines: Sequence[str]

    @property
    def reason(self) -> str:
        """The last line that is not empty: of a Python program that failed, the exception."""
        last = next((line for line in reversed(self.lines) if line.strip()), "no output")
        if self.code is None:
            return f"ended after {self.seconds:.0f} s; last line: {last.strip()}"
        return f"exit code {self.code}: {last.strip()}"


def run(
    command: Sequence[str],
    *,
    seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    echo: Callable[[str], object] = lambda line: None,
    watch: Callable[[subprocess.Popen[str]], object] | None = None,
) -> Ended:
    """Run a command to its end, or to its limit.

    Args:
        command: Program and arguments.
        seconds: Time limit, after which its process group is ended; None for no limit.
        environment: Environment variables; by default those of this process.
        directory: Working directory.
        echo: Called with each line of its output as it comes, on another thread.
        watch: Called with the process once it has been started, to send it a signal, say; it must
            return within the limit.
    """
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    began = time.monotonic()
    process = subprocess.Popen(
        list(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=None if environment is None else dict(environment),
        cwd=directory,
        start_new_session=True,
    )

    def pump() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.append(line.rstrip("\n"))
                echo(line)

    reader = threading.Thread(target=pump, daemon=True)
    reader.start()
    code = None
    try:
        if watch is not None:
            watch(process)
        left = None if seconds is None else max(0.1, seconds - (time.monotonic() - began))
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(left)
    finally:
        end(process)
        reader.join(_GRACE_S)
    return Ended(code, time.monotonic() - began, list(lines))


def end(process: subprocess.Popen[Any], grace_s: float = _GRACE_S) -> None:
    """Ask the process group to end, and kill what does not within ``grace_s`` seconds."""
    if not _signal(process.pid, signal.SIGTERM):
        return
    until = time.monotonic() + grace_s
    while time.monotonic() < until:
        process.poll()
        if not _signal(process.pid, 0):
            return
        time.sleep(0.05)
    _signal(process.pid, signal.SIGKILL)
    process.wait()


def _signal(group: int, number: int) -> bool:
    """Return whether the group still has a process to get a signal."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """SIGTERM raises SystemExit in the block, so that `run` ends what it has started."""
    if threading.current_thread() != threading.main_thread():
        yield
        return

    def leave(*_: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
