"""Reports stalled or lost ranks, with their step, phase and utterances.

Every rank writes its phase to the store about once a second. A rank that loses the others, or waits
for them too long, reports the silent ranks and their last phases. A separate thread reports a rank
that is itself stuck, in a read that does not return or a kernel that does not end, and ends its
process.
"""

import json
import logging
import os
import re
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from effasr.distributed.failures import PeerFailed, record_failure, write_torchrun_error
from effasr.distributed.process_group import DistributedContext
from effasr.training.fault_tolerance.phase_tracker import COMPUTING, LOADING, WAITING, PhaseTracker
from effasr.untrusted.display import escape_controls

log = logging.getLogger(__name__)

EX_TEMPFAIL = 75  # Exit code from <sysexits.h>: a restart may succeed

_SIGNS = ("gloo", "Connection ", "connection", "Timed out waiting", "NCCL", "Broken pipe")
"""Parts of torch's messages about a lost rank."""

_BEAT_S = 1.0
_RANKS_PER_BEAT = 256
_SHOWN = 6
_SLOW, _SLOW_S = 1.5, 0.05
_JUDGED_STEPS, _JUDGED_S = 20, 5.0
_SUSPENDED_S = 5.0  # A check that is so late tells that the whole process did not run


class RankLost(RuntimeError):
    """Other ranks have ended or do not answer; the message names them."""

    exit_code = EX_TEMPFAIL


class Watchdog:
    def __init__(
        self,
        context: DistributedContext,
        phases: PhaseTracker,
        timeout_s: float,
        data_timeout_s: float,
        reading: Callable[[], Sequence[str]],
        before_exit: Callable[[], object] = lambda: None,
    ) -> None:
        self._context = context
        self._phases = phases
        self._reading = reading
        self._before_exit = before_exit
        # A hanging kernel never raises an error; torch would end the process at its limit without a
        # report of the utterances. Gloo's calls do raise an error at the limit.
        computing = timeout_s * (0.9 if context.device.type == "cuda" else 1.25) + 1.0
        self._limits = {LOADING: ("data_timeout_s", data_timeout_s)}
        if context.size > 1:
            self._limits[WAITING] = self._limits[COMPUTING] = ("timeout_s", computing)
        self._beat_s = max(_BEAT_S, context.size / _RANKS_PER_BEAT)
        self._ended = threading.Event()
        self._store: Store | None = None
        self._heard: list[dict[str, Any]] = []
        self._known: list[tuple[int, float]] = [(0, 0.0)] * context.size
        self._judged = self._known
        self._judged_at = time.monotonic()
        self._warned: int | None = None
        self._running_since = 0.0
        self._entered = time.monotonic()

    def __enter__(self) -> Self:
        """Start the thread; all ranks enter, at about the same time."""
        self._ended.clear()
        self._entered = time.monotonic()
        if self._context.store is not None:
            # A separate connection, because another thread may wait on the first.
            self._store = self._context.store.clone()  # type: ignore[attr-defined]
            self._beat(0)
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """End the thread; name the lost ranks if they caused the error."""
        self._ended.set()
        if self._store is None or not _is_loss(error):
            return
        # Without the source location and the advice.
        reason = re.sub(r"^\[\S*\] ", "", " ".join(str(error).split())).partition(". ")[0]
        raise RankLost(
            f"rank {self._context.rank}: {_describe(self._own())}: cannot reach the others. "
            f"{self._missing()} A restart continues from the last checkpoint. "
            f"(PyTorch: {reason})"
        ) from error

    def slowest(self) -> dict[str, Any]:
        """Return the rank with the most own time since the last call, for a line of metrics."""
        reports = [(item["own"][0], item["own"][1]) for item in self._heard]
        if self._context.size == 1:
            return {"slowest_rank": 0, "rank_wait_s": 0.0}
        if not reports:
            return {"slowest_rank": None, "rank_wait_s": None}
        rank, seconds, median = _slowest(self._known, reports)
        self._known = reports
        self._warn(reports)
        return {"slowest_rank": rank, "rank_wait_s": seconds - median}

    def _warn(self, reports: list[tuple[int, float]]) -> None:
        """Warn of a rank that is persistently slow, and again when it is another rank."""
        now = time.monotonic()
        made = reports[self._context.rank][0] - self._judged[self._context.rank][0]
        if made < _JUDGED_STEPS or now - self._judged_at < _JUDGED_S:
            return
        rank, seconds, median = _slowest(self._judged, reports)
        self._judged, self._judged_at = reports, now
        if seconds < _SLOW * median or seconds - median < _SLOW_S:
            self._warned = None
        elif rank != self._warned:
            self._warned = rank
            log.warning(
                "rank %d is slow: it needs %.2f s of its own for a step, the median rank %.2f s, "
                "and the others wait for it. Its phase: %s.",
                rank,
                seconds,
                median,
                _describe(self._heard[rank]),
            )

    def _run(self) -> None:
        count, answers = 0, self._store is not None
        interval_s = min(self._beat_s, *(s / 4 for _, s in self._limits.values()))
        last = time.monotonic()
        while not self._ended.wait(interval_s):
            count += 1
            self._excuse(time.monotonic() - last - interval_s)
            last = time.monotonic()
            self._check()
            if not answers:
                continue
            try:
                self._beat(count)
                if self._context.is_main:
                    self._heard = self._read()
            except RuntimeError as error:
                # The training thread will notice the loss itself.
                log.debug("the store does not answer: %s", error)
                answers = False

    def _beat(self, count: int) -> None:
        if self._store is not None:
            beat = json.dumps(self._own() | {"count": count})
            self._store.set(f"phase/{self._context.rank}", beat)

    def _own(self) -> dict[str, Any]:
        now = self._phases
        utterances = list(now.utterances) or (list(self._reading()) if now.phase == LOADING else [])
        return {
            "step": now.step,
            "phase": now.phase,
            "seconds": time.monotonic() - now.since,
            "utterances": utterances[:_SHOWN],
            "more": max(0, len(utterances) - _SHOWN),
            "own": (now.steps, now.seconds),
            # Ranks have no other clock in common: the time of day differs between machines and may
            # be set while they train.
            "at": time.monotonic() - self._entered,
        }

    def _read(self) -> list[dict[str, Any]]:
        """Return the last reports of all ranks; an empty list until each has one."""
        assert self._store is not None
        names = [f"phase/{rank}" for rank in range(self._context.size)]
        if not self._store.check(names):
            return []
        return [json.loads(text) for text in self._store.multi_get(names)]

    def _missing(self) -> str:
        """Describe the ranks that are silent or late, with their last phase."""
        try:
            before = self._read()
            time.sleep(1.5 * self._beat_s)
            after = self._read()
        except RuntimeError:
            return "The store cannot be reached either: the node of rank 0 may be lost."
        if not after or not before:
            return "Not all ranks have started to train."
        ranks = [rank for rank in range(self._context.size) if rank != self._context.rank]
        silent = [rank for rank in ranks if after[rank]["count"] == before[rank]["count"]]
        if silent:
            return self._listed(silent, after, "no longer answers")
        newest = max(item["step"] for item in after)
        waiting = WAITING, COMPUTING
        late = [r for r in ranks if after[r]["step"] < newest or after[r]["phase"] not in waiting]
        if late:
            return self._listed(late, after, "answers, but is behind")
        return "All ranks answer, so the network between them may be at fault."

    def _listed(self, ranks: Sequence[int], reports: Sequence[dict[str, Any]], what: str) -> str:
        parts, now = [], time.monotonic() - self._entered
        for rank in ranks[:_SHOWN]:
            ago = max(0.0, now - reports[rank]["at"])
            last = _describe(reports[rank])
            parts.append(f"Rank {rank} {what}: {ago:.0f} s ago it was at {last}.")
        remainder = (
            "" if len(ranks) <= _SHOWN else f" The same holds for {len(ranks) - _SHOWN} more."
        )
        return " ".join(parts) + remainder

    def _excuse(self, late_s: float) -> None:
        """Restart the clocks if the process was suspended: by SIGSTOP, a scheduler, or a laptop."""
        if late_s > _SUSPENDED_S:
            self._running_since = time.monotonic()
            log.warning(
                "this process did not run for %.1f s (it was suspended, or the machine is "
                "overloaded): time limits count from now",
                late_s,
            )

    def _check(self) -> None:
        """End the process if this rank is stuck."""
        name, limit = self._limits.get(self._phases.phase, ("", None))
        since = max(self._phases.since, self._running_since)
        if limit is None or time.monotonic() - since < limit:
            return
        text = escape_controls(
            f"rank {self._context.rank}: {_describe(self._own())}: no progress for "
            f"{limit:.3g} s (training.{name}), so this process is ended. It hangs {_where()}. "
            "A restart continues from the last checkpoint."
        )
        sys.stderr.write(f"effasr train: {text}\n")
        sys.stderr.flush()
        write_torchrun_error(text)
        try:
            if self._store is not None and self._context.store is not None:
                losses = len(self._context.survivors)
                record_failure(self._store, self._context.rank, text, losses)
        except RuntimeError as error:
            log.debug("the store does not answer: %s", error)
        try:
            self._before_exit()
        finally:
            # Not by an exception, which the training thread would not see.
            os._exit(EX_TEMPFAIL)


def _slowest(
    before: Sequence[tuple[int, float]], now: Sequence[tuple[int, float]]
) -> tuple[int, float, float]:
    """Return the slowest rank, its own seconds per step, and those of the median rank."""
    means = [
        (seconds - before_s) / max(steps - made, 1)
        for (steps, seconds), (made, before_s) in zip(now, before, strict=True)
    ]
    rank = max(range(len(means)), key=means.__getitem__)
    return rank, means[rank], statistics.median_low(means)


def _is_loss(error: BaseException | None) -> bool:
    """Return whether an error is that of a collective call that another rank did not join."""
    if isinstance(error, PeerFailed) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS)


def _describe(report: dict[str, Any]) -> str:
    more = f" and {report['more']} more" if report["more"] else ""
    utterances = (
        f", utterances {', '.join(report['utterances'])}{more}" if report["utterances"] else ""
    )
    return f"step {report['step']}, {report['phase']}{utterances}, for {report['seconds']:.1f} s"


def _where() -> str:
    """Return the innermost call of the main thread, and the innermost ones of this package."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    *outer, innermost = traceback.extract_stack(frame)
    ours = [call for call in outer if f"{os.sep}effasr{os.sep}" in call.filename]
    calls = [innermost, *reversed(ours[-2:])]
    places = [f"{call.name} ({os.path.basename(call.filename)}:{call.lineno})" for call in calls]
    return "in " + ", called by ".join(places)
