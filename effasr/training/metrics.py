"""Sums up the reports of steps, and returns them as lines of metrics.jsonl."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from effasr.distributed.process_group import DistributedContext
from effasr.training.flops import peak_flops
from effasr.training.memory import peak_bytes
from effasr.training.step import StepReport
from effasr.training.step_stats import StepCounts

_MEANS = ("loss", "cross_entropy", "ctc", "transducer", "guided", "grad_norm")
"""The first entries of `StepReport.values`."""
_SUMS = ("steps", "updates", "audio_seconds", "tokens", "imbalance", *_MEANS)
_FLOPS = ("useful_flops", "computed_flops", "hardware_flops")
_ROWS = ("frames", "frame_rows", "token_rows", *_FLOPS)


@dataclass(slots=True)
class TrainingMetrics:
    """Sums since the last line.

    Reports are read one step late: the GPU has computed them by then and runs the next step.

    Attributes:
        device: Device of this rank.
        ranks: Number of ranks that share a step.
        skipped: Updates skipped since the beginning of the run because of a non-finite loss or
            gradient.
        in_a_row: Number of consecutive skipped updates up to the newest known report.
        oom_splits: Micro-batches, and pieces of them, that all ranks split after out-of-memory
            errors.
        stopping: Whether a rank was asked to stop.
    """

    device: torch.device
    ranks: int = 1
    skipped: int = 0
    in_a_row: int = 0
    oom_splits: int = 0
    stopping: bool = False
    _sums: dict[str, float] = field(default_factory=dict)
    _pending: deque[StepReport] = field(default_factory=deque)
    _seconds: float = 0.0
    _waited: float = 0.0
    _timed: int = 0
    _lr: float = 0.0
    _guided: bool = False
    _gain: dict[str, float] = field(default_factory=dict)
    _merged: tuple[int, int] = (0, 0)

    def add(self, report: StepReport) -> None:
        """Add a report; `collect` reads it."""
        self._pending.append(report)
        counts = StepCounts.from_values(report.counts.read())
        self.stopping = counts.stopping > 0
        self._increase(
            steps=1,
            audio_seconds=counts.audio_seconds,
            tokens=counts.tokens,
            imbalance=counts.rank_imbalance,
            frames=counts.frames,
            frame_rows=counts.frame_rows,
            token_rows=counts.token_rows,
            useful_flops=counts.useful_flops,
            computed_flops=sum(counts.work),
            hardware_flops=sum(counts.work) + counts.recomputed_flops,
        )

    def collect(self, *, leave: int = 1) -> list[StepReport]:
        """Read all reports but the newest ``leave``; return those whose update was skipped."""
        left_out = []
        while len(self._pending) > leave:
            report = self._pending.popleft()
            *means, finite, guiding, splits = report.values.read()
            self._lr = report.lr
            if report.gain is not None:
                gain, progress, factor = report.gain.read()
                self._gain = {"gain": gain, "progress": progress}
                self._lr *= factor
            self._guided = bool(guiding)
            self.oom_splits += round(splits)
            if not finite:
                self.skipped += 1
                self.in_a_row += 1
                left_out.append(report)
                continue
            self.in_a_row = 0
            self._increase(updates=1, **dict(zip(_MEANS, means, strict=True)))
        return left_out

    def merge(self, context: DistributedContext, *, counts: bool) -> None:
        """Sum ``skipped`` and ``oom_splits`` over learners; ``counts`` marks one rank of each."""
        before = self._merged
        own = (self.skipped - before[0], self.oom_splits - before[1]) if counts else (0, 0)
        skipped, splits = map(sum, zip(*context.all_gather(own), strict=True))
        self.skipped, self.oom_splits = before[0] + skipped, before[1] + splits
        self._merged = self.skipped, self.oom_splits

    def time(self, seconds: float, waited: float) -> None:
        """Record the duration of a step and of its wait for data, in seconds."""
        self._seconds += seconds
        self._waited += waited
        self._timed += 1

    def line(self, step: int, epoch: int) -> dict[str, Any]:
        """Return the means per step since the last line, and start again."""
        sums = {name: self._sums.get(name, 0.0) for name in (*_SUMS, *_ROWS)}
        steps, updates = max(sums["steps"], 1), sums["updates"]
        timed = max(self._timed, 1)
        means = {name: sums[name] / updates if updates else None for name in _MEANS}
        step_s = self._seconds / timed
        useful, computed, hardware = (
            sums[name] / steps / step_s / self.ranks if step_s else 0.0 for name in _FLOPS
        )
        peak = peak_flops(self.device)
        line = {
            "step": step,
            "epoch": epoch,
            **means,
            "guided_on": self._guided,
            "lr": self._lr,
            **self._gain,
            "audio_seconds": sums["audio_seconds"] / steps,
            "tokens": sums["tokens"] / steps,
            "padding_frames": _padding(sums["frames"], sums["frame_rows"]),
            "padding_tokens": _padding(sums["tokens"], sums["token_rows"]),
            "data_wait_s": self._waited / timed,
            "step_s": step_s,
            "mfu": None if peak is None else useful / peak,
            "mfu_with_padding": None if peak is None else computed / peak,
            "hfu": None if peak is None else hardware / peak,
            "useful_tflops": useful / 1e12,
            "peak_memory_bytes": peak_bytes(self.device),
            "rank_imbalance": sums["imbalance"] / steps,
            "skipped": self.skipped,
            "oom_splits": self.oom_splits,
        }
        self._sums.clear()
        self._seconds = self._waited = 0.0
        self._timed = 0
        return line

    def state_dict(self) -> dict[str, Any]:
        """Return the sums for the next line; all reports must have been collected."""
        if self._pending:
            raise RuntimeError("`collect(leave=0)` must come before `state_dict`.")
        return {"sums": dict(self._sums), "skipped": self.skipped, "oom_splits": self.oom_splits}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._sums = dict(state["sums"])
        self.skipped = state["skipped"]
        self.oom_splits = state.get("oom_splits", 0)
        self._merged = self.skipped, self.oom_splits

    def _increase(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self._sums[name] = self._sums.get(name, 0.0) + amount


def _padding(used: float, rows: float) -> float:
    return 1 - used / rows if rows else 0.0
