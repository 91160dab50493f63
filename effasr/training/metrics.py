"""Sums up the reports of steps, and returns them as lines of metrics.jsonl."""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from effasr.data.mixture_summary import Mixture, MixtureSummary
from effasr.distributed.process_group import DistributedContext
from effasr.training.flops import peak_flops
from effasr.training.loss import LOSSES
from effasr.training.memory import peak_bytes
from effasr.training.step import StepReport
from effasr.training.step_stats import StepCounts

if TYPE_CHECKING:
    from effasr.data.loader import StepBatch
    from effasr.training.corpus import TrainingCorpus

_MEANS = (*LOSSES, "grad_norm")
_FLOPS = ("useful_flops", "computed_flops", "hardware_flops")
_SUMS = (
    *("steps", "updates", "audio_seconds", "tokens", "imbalance", *_MEANS),
    *("frames", "frame_rows", "token_rows", *_FLOPS),
)


class Gauge(Protocol):
    """Counts on the device of a rank, from one line of metrics.jsonl to the next."""

    def line(self) -> dict[str, Any]:
        """Return fields of metrics.jsonl, and count anew; waits for the device."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(slots=True)
class TrainingMetrics:
    """Sums since the last line.

    Reports are read one step late: the GPU has computed them by then and runs the next step.
    """

    device: torch.device
    # Number of ranks that share a step.
    ranks: int = 1
    # Updates skipped since the beginning of the run because of a non-finite loss or gradient, and
    # those in a row up to the newest known report.
    skipped: int = 0
    consecutive_skips: int = 0
    # Micro-batches, and pieces of them, that all ranks split after out-of-memory errors.
    oom_splits: int = 0
    # Whether a rank was asked to stop.
    stopping: bool = False
    # Intervals in time that were over when the newest step began: `StepCounts.due`.
    due: int = 0
    _sums: dict[str, float] = field(default_factory=dict)
    _pending: deque[StepReport] = field(default_factory=deque)
    _seconds: float = 0.0
    _waited: float = 0.0
    _timed: int = 0
    _lr: float = 0.0
    _guided_on: bool = False
    _gain: dict[str, float] = field(default_factory=dict)
    _merged: tuple[int, int] = (0, 0)

    def add(self, report: StepReport) -> None:
        """Add a report; `collect` reads it."""
        self._pending.append(report)
        counts = StepCounts.from_values(report.counts.read())
        self.stopping = counts.stopping > 0
        self.due = round(counts.due)
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

    def collect(self, *, keep_pending: int = 1) -> list[StepReport]:
        """Read all but the newest reports; return those whose update was skipped."""
        skipped = []
        while len(self._pending) > keep_pending:
            report = self._pending.popleft()
            figures = report.read()
            self._lr = report.lr
            if report.gain is not None:
                gain, progress, factor = report.gain.read()
                self._gain = {"gain": gain, "progress": progress}
                self._lr *= factor
            self._guided_on = bool(figures["guided_on"])
            self.oom_splits += round(figures["splits"])
            if not figures["finite"]:
                self.skipped += 1
                self.consecutive_skips += 1
                skipped.append(report)
                continue
            self.consecutive_skips = 0
            self._increase(updates=1, **{name: figures[name] for name in _MEANS})
        return skipped

    def merge(self, context: DistributedContext, *, counts: bool) -> None:
        """Sum ``skipped`` and ``oom_splits`` over learners; ``counts`` marks one rank of each."""
        before = self._merged
        new = (self.skipped - before[0], self.oom_splits - before[1]) if counts else (0, 0)
        skipped, splits = map(sum, zip(*context.all_gather(new), strict=True))
        self.skipped, self.oom_splits = before[0] + skipped, before[1] + splits
        self._merged = self.skipped, self.oom_splits

    def time(self, seconds: float, waited: float) -> None:
        """Record the duration of a step and of its wait for data."""
        self._seconds += seconds
        self._waited += waited
        self._timed += 1

    def line(self, step: int, epoch: int) -> dict[str, Any]:
        """Return the means per step since the last line, and start again."""
        sums = {name: self._sums.get(name, 0.0) for name in _SUMS}
        steps, updates = max(sums["steps"], 1), sums["updates"]
        timed = max(self._timed, 1)
        step_s = self._seconds / timed
        useful, computed, hardware = (
            sums[name] / steps / step_s / self.ranks if step_s else 0.0 for name in _FLOPS
        )
        peak = peak_flops(self.device)
        line = {
            "step": step,
            "epoch": epoch,
            **{name: sums[name] / updates if updates else None for name in _MEANS},
            "guided_on": self._guided_on,
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
        if self._pending:
            raise RuntimeError("`collect(keep_pending=0)` must come before `state_dict`.")
        return {"sums": dict(self._sums), "skipped": self.skipped, "oom_splits": self.oom_splits}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums = dict(state["sums"])
        self.skipped, self.oom_splits = state["skipped"], state["oom_splits"]
        self._merged = self.skipped, self.oom_splits

    def _increase(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self._sums[name] = self._sums.get(name, 0.0) + amount


def _padding(used: float, rows: float) -> float:
    return 1 - used / rows if rows else 0.0


class MixtureStats:
    """Utterances and samples or tokens of each source since the start of the run."""

    def __init__(self, corpus: "TrainingCorpus") -> None:
        self._corpus = corpus
        # Rows: utterances, and samples or tokens; of all ranks until the last `merge`, and of this
        # rank since.
        self._merged = [np.zeros((2, len(mixture.names)), np.int64) for mixture in self._mixtures()]
        self._new = [np.zeros_like(counts) for counts in self._merged]

    def add(self, step: "StepBatch") -> None:
        corpus = self._corpus
        if corpus.mixture is None:
            return
        self._new[0] += corpus.mixture.count(corpus.sources, corpus.amounts, step.indices)
        if (text := corpus.text) is not None:
            amounts = text.lengths.frames
            self._new[1] += text.shares.count(text.sources, amounts, step.text_indices)

    def merge(self, context: DistributedContext) -> list[MixtureSummary]:
        """Sum the counts of all ranks; return summaries of speech and, if any, of text."""
        for merged, new in zip(self._merged, self._new, strict=True):
            merged += np.sum(context.all_gather(new), axis=0)
            new[:] = 0
        pairs = zip(self._mixtures(), self._merged, strict=True)
        return [mixture.summary(counts) for mixture, counts in pairs]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": [counts.tolist() for counts in self._merged]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for merged, counts in zip(self._merged, state["drawn"], strict=True):
            merged[:] = counts

    def _mixtures(self) -> list[Mixture]:
        corpus = self._corpus
        if corpus.mixture is None:
            return []
        return [corpus.mixture, *([] if corpus.text is None else [corpus.text.shares])]
