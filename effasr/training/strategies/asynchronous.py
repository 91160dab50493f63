"""Asynchronous training: learners make independent steps and average weights in the background."""

import bisect
import logging
import os
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from effasr.data.loader import Loader, MicroBatchRef, StepBatch
from effasr.distributed.async_sgd.learners import Learners
from effasr.distributed.async_sgd.weight_averaging import WeightAveraging
from effasr.distributed.averager import Averager
from effasr.distributed.process_group import DistributedContext
from effasr.optim.adamw import initialize_state
from effasr.training.checkpointing.state import RunProgress
from effasr.training.config import TrainConfig
from effasr.training.fault_tolerance.phase_tracker import LOADING, PhaseTracker
from effasr.training.fault_tolerance.stop import StopRequest
from effasr.training.fault_tolerance.watchdog import Watchdog
from effasr.training.step import TrainState
from effasr.training.strategies.parallelism import SynchronousStrategy, average_over_ranks

log = logging.getLogger(__name__)


def form_learners(config: TrainConfig, context: DistributedContext) -> Learners | None:
    """Return the learners of adpsgd or h_adpsgd; None for a single one."""
    strategy, gossip = config.training.strategy, config.training.gossip
    size = gossip.learner_size
    if strategy == "adpsgd":
        size = 1
    elif size is None:
        size = int(os.environ.get("LOCAL_WORLD_SIZE", context.size))
    if context.size % size:
        raise ValueError(
            f"`training.gossip.learner_size` must divide the {context.size} processes, but is "
            f"{size}{'' if gossip.learner_size else ', those of this node'}: set it to the "
            "processes of each learner, or start as many on every node."
        )
    if context.size == size:
        log.warning(
            "training.strategy %s has a single learner here, of %d processes, and trains as ddp "
            "does: set training.gossip.learner_size to make learners smaller",
            strategy,
            size,
        )
        return None
    return Learners(context, size, gossip)


class AsynchronousStrategy(SynchronousStrategy):
    """Learners take steps from a shared queue and synchronize for validations and checkpoints."""

    # At sync points learners wait for each other and report when they load.
    waiting_phase = "finding work"
    logs_sync_points = True

    def __init__(self, config: TrainConfig, learners: Learners) -> None:
        super().__init__(config, learners.context)
        self.group, self.learners = learners.own, learners.count
        self._learners = learners
        # Whether this learner has made a step since the last synchronization.
        self._is_apart = False
        self._last_logged: tuple[int, float] | None = None

    def describe(self) -> Iterator[str]:
        yield (
            f"{self._learners.count} learners of {self.group.size} processes each, which average "
            "their weights in the background"
        )

    def make_averager(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, statistics: list[Tensor]
    ) -> Averager:
        gossip, seed = self._config.training.gossip, self._config.seed
        self._averaging = WeightAveraging(model, optimizer, self._learners, gossip, seed)
        return self._averaging

    @contextmanager
    def steps(
        self, loader: Loader, state: TrainState, progress: RunProgress
    ) -> Iterator[Iterator[StepBatch | None]]:
        averaging, phases = self._averaging, state.phases
        self._state = state

        def begin() -> None:
            # A learner without an update would have no moments to average.
            initialize_state(state.optimizer)
            averaging.start()

        try:
            with self._learners.training(
                _ShareLoader(loader, self._learners, phases, progress),
                progress.step,
                self._next_sync_step,
                on_begin=begin,
                on_wait=lambda: phases.begin("waiting for other learners"),
            ) as steps:
                yield steps
        except BaseException:
            averaging.abandon()
            raise

    def steps_made(self, progress: RunProgress) -> int:
        return self._learners.made

    def step_number(self, data: StepBatch, progress: RunProgress) -> int:
        return data.number // self._learners.count

    def must_stop(self, stop: StopRequest, progress: RunProgress) -> bool:
        self._is_apart = True
        # The others have to be asked to stop, too.
        return bool(stop) or super().has_progress(self._state)

    def finish(self, data: StepBatch, progress: RunProgress, *, stopping: bool) -> None:
        progress.step = self._learners.finish(data.number, stopping=stopping)
        progress.epoch = data.epoch

    def is_sync_point(self, data: StepBatch | None) -> bool:
        return data is None

    def synchronize(self, state: TrainState, progress: RunProgress) -> bool:
        learners, before = self._learners, self._context
        self._averaging.drain()
        progress.step, progress.epoch = learners.step, learners.epoch
        progress.position = learners.position
        self._context = learners.context
        average_over_ranks(state, self._context)
        # Each learner has observed its own losses; all must continue with the same objective.
        objective = {name: value.cpu() for name, value in state.objective.state_dict().items()}
        state.objective.load_state_dict(self._context.broadcast(objective))
        if state.adascale is not None:
            state.adascale.merge(self._context.all_gather(state.adascale.state_dict()))
        # The last step of a run, at which all learners were asked to stop, is none to go on from.
        self._is_apart = False
        asked = learners.stopped and not self.has_progress(state)
        self.is_stopping = asked or progress.step == self._config.training.stop_at
        return self._context is not before

    def has_progress(self, state: TrainState) -> bool:
        return not self._is_apart and super().has_progress(state)

    def metrics(self, progress: RunProgress, watchdog: Watchdog, data: StepBatch | None) -> dict:
        """Return the speed since the last call, and at sync points the consensus distance."""
        now, last = (progress.step, time.perf_counter()), self._last_logged
        self._last_logged = now
        fields: dict[str, Any] = {
            "plan_steps_per_s": None if last is None else (now[0] - last[0]) / (now[1] - last[1]),
            # Of each learner since the run was started.
            "learner_steps": self._learners.steps_of_all(),
            **self._averaging.metrics(),
        }
        if self.is_sync_point(data):
            fields["consensus_distance"] = self._averaging.distance
        return fields

    def _next_sync_step(self, step: int) -> int:
        """Return the next step with a validation, a checkpoint or the end of the run."""
        settings = self._config.training
        names = ["checkpoint_every"]
        if self._config.data.validation:
            names.append("validate_every")
        # In steps, as `resolve` checks.
        periods = [int(getattr(settings, name)) for name in names]
        ends = [settings.known_steps]
        if settings.stop_at is not None and settings.stop_at > step:
            ends.append(settings.stop_at)
        return min(*(step - step % period + period for period in periods), *ends)


class _ShareLoader:
    """Loads items of the work queue for a rank."""

    def __init__(
        self, loader: Loader, learners: Learners, phases: PhaseTracker, progress: RunProgress
    ) -> None:
        self._loader = loader
        self._learners = learners
        self._phases = phases
        self._first_epoch, number = progress.position
        # The first step of each epoch from `_first_epoch` on, and the end of the last one.
        self._epoch_begins = [progress.step - number]

    def take(self, items: Iterator[int]) -> Generator[StepBatch, None, None]:
        """Yield the data of each item; ``items`` is read ahead."""
        with closing(self._loader.take(map(self._turn, items))) as loaded:
            while True:
                self._phases.begin(LOADING)
                yield next(loaded)

    def load(self, item: int) -> StepBatch:
        self._phases.begin(LOADING)
        return self._loader.load(self._turn(item))

    def position(self, step: int) -> tuple[int, int]:
        while step >= self._epoch_begins[-1] or len(self._epoch_begins) < 2:
            epoch = self._first_epoch + len(self._epoch_begins) - 1
            self._epoch_begins.append(self._epoch_begins[-1] + self._loader.plan(epoch).num_steps)
        index = bisect.bisect_right(self._epoch_begins, step) - 1
        return self._first_epoch + index, step - self._epoch_begins[index]

    def _turn(self, item: int) -> MicroBatchRef:
        learners = self._learners
        step, share = divmod(item, learners.count)
        return MicroBatchRef(*self.position(step), share + learners.count * learners.own.rank, item)
