"""Runs one command of the suite: in its own process group, within its time, with a log."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench import processes

from suite import orphans

SHOWN_LINES = 12
"""Characters of the end of a log that are shown after a failure."""
POISONED = 86
"""Exit code of a process that ended itself because its GPU context cannot be used any more."""
_GRACE = 8.0
"""Seconds from the request to end to the end: more than benchmarks give what they start."""
_TICK = 15.0
"""Seconds between two calls of ``tick``."""


@dataclass(frozen=True)
class Step:
    """A command of a part.

    Attributes:
        name: Name of its log, and of its line on the screen.
        command: Command to run in the root of the checkout.
        weight: Share of the part's spare time.
        floor: Least seconds that earlier steps of the part leave it.
        variables: Environment variables in addition to the suite's; an empty value unsets one.
        needs: Required packages, such as ``transformers>=5.23``.
        budget: Option that passes the available time to the command: ``--budget-s``, in
            seconds, or ``--minutes``; empty where it has none.
        beside: Whether the steps that follow in the part do not wait for it.
        before: Called before each start.
        again: Number of restarts after it ended itself with `POISONED`.
        note: Appended to the details of its result, for example that only some tests have run.
        nothing: Exit code that means that it cannot do anything here.
    """

    name: str
    command: Sequence[str]
    weight: float = 1.0
    floor: float = 0.0
    variables: Mapping[str, str] = field(default_factory=dict)
    needs: Sequence[str] = ()
    budget: str = ""
    beside: bool = False
    before: Callable[[], object] | None = None
    again: int = 0
    note: str = ""
    nothing: int | None = None


@dataclass(frozen=True)
class LeftOut:
    """A measurement that a part omits.

    Attributes:
        name: Name of the measurement.
        reason: Reason of the omission.
        well: Whether the omission is expected here, and not a failure.
    """

    name: str
    reason: str
    well: bool = True


@dataclass(frozen=True)
class Result:
    """Outcome of a step.

    Attributes:
        name: Name of the step.
        status: ``ok``, ``failed``, ``out of time``, ``interrupted`` or ``left out``.
        seconds: Duration in seconds.
        details: The exit code, or the reason.
        tail: Last lines of the log of what is not ok.
        well: Whether the suite can be content with it.
        code: Exit code, if it has ended by itself.
    """

    name: str
    status: str
    seconds: float = 0.0
    details: str = ""
    tail: Sequence[str] = ()
    well: bool = True
    code: int | None = None

    def line(self) -> str:
        """Return the line for the screen."""
        details = f": {self.details}" if self.details else ""
        return f"{self.name:28} {self.status:11} {self.seconds:6.1f} s{details}"


def limits(shares: Sequence[tuple[float, float]], seconds: float) -> list[float]:
    """Divide time by floors and weights: everybody has its floor, and a share of what is spare.

    Where the floors are more than there is, the first ones have theirs.

    Args:
        shares: Floor in seconds and weight of each.
        seconds: Seconds for all.
    """
    spare = max(0.0, seconds - sum(floor for floor, _ in shares))
    total = sum(weight for _, weight in shares) or 1.0
    found, left = [], max(0.0, seconds)
    for floor, weight in shares:
        found.append(min(left, floor + spare * weight / total))
        left -= found[-1]
    return found


class Running:
    """A command that has been started; its output goes to ``folder/NAME.log``.

    Args:
        step: Step to run.
        seconds: Time limit, after which all its processes are ended.
        folder: Folder of the logs.
        root: Working directory.
        base: Variables of the environment.

    Raises:
        OSError: The log cannot be written, or the command not be started.
    """

    def __init__(
        self, step: Step, seconds: float, folder: Path, root: Path, base: Mapping[str, str]
    ) -> None:
        self.step = step
        self._seconds, self._token = seconds, orphans.new_token()
        command = list(step.command)
        if step.budget:
            # Enough before the end for what it measures last to be written.
            told = max(5.0, seconds - 10.0)
            minutes = step.budget == "--minutes"
            command += [step.budget, f"{told / 60:.2f}" if minutes else f"{told:.0f}"]
        variables = {k: v for k, v in (dict(base) | dict(step.variables)).items() if v}
        # Behind that of the suite, so that either finds it.
        variables[orphans.VARIABLE + "_STEP"] = self._token
        if step.before is not None:
            step.before()
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / f"{step.name.replace(' ', '_').replace('/', '_')}.log"
        self._began = time.monotonic()
        with self._log.open("a" if step.again else "w", encoding="utf-8") as file:
            file.write(f"$ {' '.join(command)}\n")
            file.flush()
            self._process = subprocess.Popen(
                *(command,),
                **{"cwd": root, "env": variables, "stdout": file, "stderr": subprocess.STDOUT},
                start_new_session=True,
            )

    def finish(self, tick: Callable[[], object] = lambda: None) -> Result:
        """Wait for its end, or end it when its time is over.

        Args:
            tick: Called now and then while it runs.
        """
        code: int | None = None
        interrupted = True
        try:
            code = self._wait(tick)
            interrupted = False
        finally:
            # Also what it left behind, such as the processes of xdist.
            self.end(at_once=interrupted)
        taken = time.monotonic() - self._began
        name, note = self.step.name, self.step.note
        if code == 0:
            return Result(name, "ok", taken, note, code=0)
        tail = self.tail()
        if code is None:
            details = f"ended after {taken:.0f} s; rows until then are kept; {self._log}"
            return Result(name, "out of time", taken, _joined(details, note), tail, well=False)
        if code == self.step.nothing:
            return Result(name, "left out", taken, tail[-1] if tail else "", code=code)
        details = _joined(f"exit code {code}; {self._log}", note)
        return Result(name, "failed", taken, details, tail, well=False, code=code)

    def interrupted(self) -> Result:
        """Return the remark on a step when the suite was interrupted."""
        taken = time.monotonic() - self._began
        details = f"after {taken:.0f} s; rows until then are kept; {self._log}"
        return Result(self.step.name, "interrupted", taken, details, well=False)

    def tail(self) -> list[str]:
        """Return the last lines of its log."""
        try:
            return self._log.read_text(encoding="utf-8", errors="replace").splitlines()[
                -SHOWN_LINES:
            ]
        except OSError as error:
            return [str(error)]

    def _wait(self, tick: Callable[[], object]) -> int | None:
        end = self._began + max(1.0, self._seconds)
        while (left := end - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout=min(left, _TICK))
            tick()
        return None

    def end(self, *, at_once: bool = False) -> None:
        """Ask its process group to end, and kill what does not, in whatever group.

        Args:
            at_once: Whether there is little time: the suite itself is being ended.
        """
        processes.end(self._process, _GRACE / 4 if at_once else _GRACE)
        orphans.kill(self._token, orphans.VARIABLE + "_STEP")


def run(
    step: Step,
    seconds: float,
    folder: Path,
    root: Path,
    base: Mapping[str, str],
    tick: Callable[[], object] = lambda: None,
) -> Result:
    """Run a step to its end; see `Running`."""
    return Running(step, seconds, folder, root, base).finish(tick)


def _joined(*said: str) -> str:
    return "; ".join(filter(None, said))
