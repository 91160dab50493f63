"""Which steps are timed, and each in a process of its own: an error must not end the others."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import processes

MODES = ("eager", "graph", "compile", "graph_compile")
"""Launch and compilation of a step's kernels: see ``training.cuda_graph`` and ``compile``."""
STATIC = "packed_static"
"""The system with static shapes, which graphs and compilation need."""
LEFT_OUT = 3
"""Exit code of a process whose job cannot be done here, for a reason that it wrote."""
MARK = "bench_training: "
_LEAST_S = 60.0


@dataclass(frozen=True)
class Job:
    """One row of the table.

    Attributes:
        model: Name of the model; None for the one of the device.
        system: System that is timed.
        mode: Mode of `MODES`.
    """

    model: str | None
    system: str
    mode: str = "eager"

    @property
    def name(self) -> str:
        """Name shown on the screen."""
        mode = "" if self.mode == "eager" else f" {self.mode}"
        return f"{self.model or ''} {self.system}{mode}".strip()


@dataclass(frozen=True)
class Verdict:
    """Outcome of a job.

    Attributes:
        job: The job.
        status: ``ok``, ``left out`` or ``failed``.
        reason: Reason of a status other than ok.
    """

    job: Job
    status: str
    reason: str = ""

    def line(self) -> str:
        """Return the line for the screen."""
        return f"{MARK}{self.job.name}: {self.status}: {self.reason}"


def jobs(models: Sequence[str | None], systems: Sequence[str], modes: Sequence[str]) -> list[Job]:
    """Return the modes of static batches for each model, then the other systems, eager."""
    static = [Job(model, STATIC, mode) for model in models for mode in modes if STATIC in systems]
    others = [
        Job(model, system)
        for model in models
        for system in systems
        if system != STATIC and "eager" in modes
    ]
    return [*static, *others]


def unsupported_reason(job: Job, *, on_gpu: bool) -> str | None:
    """Return why a job cannot run on this device; None if it can."""
    if "graph" in job.mode and not on_gpu:
        return "`training.cuda_graph` needs a GPU, and there is none"
    return None


def run_apart(
    chosen: Sequence[Job],
    command: Callable[[Job], Sequence[str]],
    *,
    budget_s: float | None = None,
    case_s: float | None = None,
) -> list[Verdict]:
    """Run each job in a process of its own, one after the other; their output is shown.

    Args:
        chosen: Chosen in the order in which they run.
        command: Command of a job; it exits with 0, or with `LEFT_OUT`, or else it has failed.
        budget_s: Seconds for all; jobs that it does not reach fail.
        case_s: Seconds for each; by default a generous share of what is left of the budget.
    """
    end = None if budget_s is None else time.monotonic() + budget_s
    verdicts = []
    with processes.sigterm_as_exit():
        for number, job in enumerate(chosen):
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                verdicts.append(Verdict(job, "failed", "no time left of the budget"))
                continue
            limit = _limit(left, len(chosen) - number, case_s)
            ended = processes.run(command(job), seconds=limit, echo=_show)
            verdicts.append(_verdict(job, ended))
    return verdicts


def _limit(left: float | None, jobs_left: int, case_s: float | None) -> float | None:
    if left is None:
        return case_s
    # More than an equal share: the first ones, which matter most, also compile for the others.
    share = max(_LEAST_S, 2.5 * left / jobs_left) if case_s is None else case_s
    return min(left, share)


def _show(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


def _verdict(job: Job, ended: processes.Ended) -> Verdict:
    if ended.code == 0:
        return Verdict(job, "ok")
    told = [line for line in ended.lines if line.startswith(MARK)]
    reason = told[-1].removeprefix(MARK) if told and ended.code is not None else ended.reason
    for shown in (job.name, "left out", "failed"):
        reason = reason.removeprefix(f"{shown}: ")
    return Verdict(job, "left out" if ended.code == LEFT_OUT else "failed", reason)


def summarize(verdicts: Sequence[Verdict]) -> str:
    """Return a line: the number of measured jobs, and why others were not."""
    measured = sum(verdict.status == "ok" for verdict in verdicts)
    others = [
        f"{verdict.job.name} {verdict.status} ({verdict.reason})"
        for verdict in verdicts
        if verdict.status != "ok"
    ]
    return "; ".join([f"{MARK}{measured} of {len(verdicts)} measured", *others])
