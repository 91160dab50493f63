"""Synchronous training: all ranks make each step together."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing
from typing import Any, cast

import torch
from torch import Tensor, nn

from effasr.data.loader import Loader
from effasr.data.micro_batch_loader import StepBatch
from effasr.distributed.averager import Averager
from effasr.distributed.process_group import DistributedContext
from effasr.training.checkpointing.state import RunProgress
from effasr.training.config import TrainConfig
from effasr.training.fault_tolerance.phase_tracker import LOADING
from effasr.training.fault_tolerance.stop import StopRequest
from effasr.training.fault_tolerance.watchdog import Watchdog
from effasr.training.step import TrainState
from effasr.training.strategies.parallelism import make_averager


class SynchronousStrategy:
    """Provides the iterator of steps, the sync points and the rule to stop.

    Every step is a sync point.
    """

    # Phase of a rank that waits for its next micro-batches.
    waiting_phase = LOADING
    # Whether a line is logged at each sync point.
    logs_sync_points = False

    def __init__(self, config: TrainConfig, context: DistributedContext) -> None:
        self._config = config
        self._context = context
        # Ranks that make a step together.
        self.group = context
        # Whether the run ends here because of a request to stop.
        self.is_stopping = False

    @property
    def context(self) -> DistributedContext:
        """All remaining ranks."""
        return self._context

    def describe(self) -> Iterator[str]:
        yield from ()

    def make_averager(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, statistics: list[Tensor]
    ) -> Averager:
        return make_averager(self._config, model, optimizer, statistics, self._context)

    def steps(
        self, loader: Loader, state: TrainState, progress: RunProgress
    ) -> AbstractContextManager[Iterator[StepBatch | None]]:
        """Return an iterator of this rank's steps; None where ranks have to be synchronized."""
        # A generator, so that closing it ends the data workers.
        return closing(cast(Generator[StepBatch | None], loader.steps(*progress.position)))

    def steps_made(self, progress: RunProgress) -> int:
        """Return the number of steps that this rank has made."""
        return progress.step

    def step_number(self, data: StepBatch, progress: RunProgress) -> int:
        """Return the number of the global step that data belong to, from 0."""
        return progress.step

    def must_stop(self, stop: StopRequest, progress: RunProgress) -> bool:
        """Return whether this rank requests a stop after the step that begins now."""
        return bool(stop) or progress.step + 1 == self._config.training.stop_at

    def finish(self, data: StepBatch, progress: RunProgress, *, stopping: bool) -> None:
        progress.step += 1
        progress.epoch, progress.position = data.epoch, data.next_position
        self.is_stopping = stopping

    def is_sync_point(self, data: StepBatch | None) -> bool:
        return True

    def synchronize(self, state: TrainState, progress: RunProgress) -> bool:
        """Make all ranks equal after None from `steps`; return whether some were lost."""
        return False

    def metrics(self, progress: RunProgress, watchdog: Watchdog, data: StepBatch | None) -> dict:
        """Return fields of metrics.jsonl about the speed of ranks; only rank 0 calls this."""
        fields: dict[str, Any] = watchdog.slowest()
        return fields
