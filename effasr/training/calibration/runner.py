"""Runs trials in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from effasr.training.calibration.trial import Measurement, Request

_COMMAND = [sys.executable, "-m", "effasr.training.calibration.trial"]

_OF_THE_RUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that would make a trial consider itself a rank of the run that started it."""

_KILLED = {-signal.SIGKILL: "the system killed it", -signal.SIGABRT: "it aborted"}
_SIGNS_OF_ABORT = ("bad_alloc", "out of memory", "Cannot allocate memory", "MemoryError")


class TrialFailed(RuntimeError):
    """A trial failed for another reason than a lack of memory."""


def measure(
    request: Request,
    *,
    timeout_s: float = 1800.0,
    alive: Callable[[], None] = lambda: None,
    every_s: float = 10.0,
) -> Measurement:
    """Run a trial and wait for it."""
    process = subprocess.Popen(
        [*_COMMAND, str(os.getpid())],
        env=_environment(os.environ),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A new session, so that signals of the terminal reach this process only, which ends the
        # trial.
        start_new_session=True,
    )
    with process:
        try:
            out, error = _finish(process, request, time.monotonic() + timeout_s, alive, every_s)
        except subprocess.TimeoutExpired:
            raise TrialFailed(
                f"a trial of {request.workload.shape.frame_budget} frames took more than "
                f"{timeout_s:.0f} s, and was stopped."
            ) from None
        finally:
            process.kill()
    return _result(process.returncode, out, error)


def _finish(
    process: subprocess.Popen[str],
    request: Request,
    deadline: float,
    alive: Callable[[], None],
    every_s: float,
) -> tuple[str, str]:
    """Return the output of the process."""
    text: str | None = request.to_json()
    while True:
        try:
            return process.communicate(text, timeout=every_s)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise
        # The next call continues with unwritten input and unread output.
        text = None
        alive()


def _result(code: int, out: str, error: str) -> Measurement:
    if code == 0:
        return Measurement(**json.loads(out.splitlines()[-1]))
    if code == -signal.SIGKILL or any(sign in error for sign in _SIGNS_OF_ABORT):
        return Measurement(fits=False, reason=_KILLED.get(code, f"it ended with {code}"))
    lines = [line for line in error.splitlines() if line.strip()]
    last = lines[-1] if lines else "it wrote nothing"
    raise TrialFailed(f"a trial ended with {code}: {last}")


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of a rank, and with this import path."""
    kept = {
        name: value
        for name, value in own.items()
        if name not in _OF_THE_RUN and not name.startswith("TORCHELASTIC_")
    }
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
