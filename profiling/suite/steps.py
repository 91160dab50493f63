"""Runs one command of the suite: in its own process group, within its time, with a log."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SHOWN_LINES = 12
"""Of the end of a log, where a command failed."""
_GRACE = 5.0
"""Seconds from the request to end to the end."""


@dataclass(frozen=True)
class Step:
    """A command of a part.

    Attributes:
        name: Of its log, and of its line on the screen.
        command: To run in the root of the checkout.
        weight: Its share of the part's time.
        variables: Of the environment, beside the suite's; an empty one is taken away.
        needs: What must be installed, such as ``transformers>=5.23``.
        is_budgeted: Whether ``--budget-s`` tells the command how much time there is.
    """

    name: str
    command: Sequence[str]
    weight: float = 1.0
    variables: Mapping[str, str] = field(default_factory=dict)
    needs: Sequence[str] = ()
    is_budgeted: bool = False


@dataclass(frozen=True)
class LeftOut:
    """What a part does not do.

    Attributes:
        name: Of what.
        reason: Why.
        well: Whether that is to be expected here, and no failure.
    """

    name: str
    reason: str
    well: bool = True


@dataclass(frozen=True)
class Result:
    """How a step ended.

    Attributes:
        name: Of the step.
        status: ``ok``, ``failed``, ``out of time`` or ``left out``.
        seconds: It took.
        details: The exit code, or the reason.
        tail: Last lines of the log of what is not ok.
        well: Whether the suite can be content with it.
    """

    name: str
    status: str
    seconds: float = 0.0
    details: str = ""
    tail: Sequence[str] = ()
    well: bool = True

    def line(self) -> str:
        """For the screen."""
        details = f": {self.details}" if self.details else ""
        return f"{self.name:24} {self.status:11} {self.seconds:6.1f} s{details}"


def run(step: Step, seconds: float, folder: Path, root: Path, base: Mapping[str, str]) -> Result:
    """Run a step; its output goes to ``folder/NAME.log``.

    Args:
        step: What.
        seconds: After which it is ended, with all its processes.
        folder: Of the logs.
        root: Where it runs.
        base: Variables of the environment.
    """
    command = list(step.command)
    if step.is_budgeted:
        # Enough before the end for what it measures last to be written.
        command += ["--budget-s", f"{max(5.0, seconds - 10.0):.0f}"]
    variables = {k: v for k, v in (dict(base) | dict(step.variables)).items() if v}
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{step.name.replace(' ', '_').replace('/', '_')}.log"
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        process = subprocess.Popen(
            *(command,),
            **{"cwd": root, "env": variables, "stdout": file, "stderr": subprocess.STDOUT},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Also what it left behind, such as the processes of xdist.
            _end(process)
    taken = time.monotonic() - began
    if code == 0:
        return Result(step.name, "ok", taken)
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
    if code is None:
        details = f"ended after {taken:.0f} s; rows until then are kept; {log}"
        return Result(step.name, "out of time", taken, details, tail, well=False)
    return Result(step.name, "failed", taken, f"exit code {code}; {log}", tail, well=False)


def _end(process: subprocess.Popen) -> None:
    """Ask the process group to end, and end what does not."""
    if _signal(process.pid, signal.SIGTERM):
        until = time.monotonic() + _GRACE
        while time.monotonic() < until:
            process.poll()
            if not _signal(process.pid, 0):
                return
            time.sleep(0.05)
        _signal(process.pid, signal.SIGKILL)
        process.wait()


def _signal(group: int, number: int) -> bool:
    """Whether there is still something in the group to get a signal."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False
