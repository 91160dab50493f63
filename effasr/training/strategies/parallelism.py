"""Distribution of a model, its optimizer and its weights over ranks, and their common steps."""

import copy
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from effasr.distributed.averager import Averager, DelayedAveraging, LocalSGD, average_each
from effasr.distributed.ddp import replicate
from effasr.distributed.fsdp import gather, shard
from effasr.distributed.process_group import DistributedContext
from effasr.training.checkpointing.state import RunProgress
from effasr.training.config import TrainConfig
from effasr.training.fault_tolerance.phase_tracker import LOADING
from effasr.training.fault_tolerance.stop import StopRequest
from effasr.training.fault_tolerance.watchdog import Watchdog
from effasr.training.step import TrainState

if TYPE_CHECKING:
    # A model can be trained without the packages that read data.
    from effasr.data.loader import Loader, StepBatch


def distribute(config: TrainConfig, model: nn.Module, context: DistributedContext) -> nn.Module:
    """Return the model to train: itself, with or without the wrapper of ddp, or a sharded copy.

    With fsdp2, ``model`` stays on the CPU, and `full_weights` fills it.
    """
    if config.training.cuda_graph is True:
        # `build` exchanges gradients after the recording.
        return model
    if config.training.strategy != "fsdp2" or context.size == 1:
        return replicate(model, context)
    sharded = copy.deepcopy(model)
    model.cpu()
    shard(sharded, context, narrow_dtype(config.training.precision, context.device))
    return sharded


def make_averager(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    statistics: list[Tensor],
    context: DistributedContext,
) -> Averager:
    """Return the averager of a strategy in which all ranks make each step together."""
    settings = config.training
    arguments = (model, optimizer, statistics, context)
    if context.size > 1 and settings.strategy == "local_sgd":
        local = settings.local_sgd
        return LocalSGD(*arguments, local.warmup_steps, {local.period: None})
    if context.size > 1 and settings.strategy == "hierarchical":
        levels = settings.hierarchical
        return LocalSGD(*arguments, levels.warmup_steps, levels.periods)
    if context.size > 1 and settings.strategy == "delayed":
        return DelayedAveraging(*arguments, settings.delayed.warmup_steps)
    return Averager()


def is_bfloat16(precision: str, device: torch.device) -> bool:
    return narrow_dtype(precision, device) == torch.bfloat16


def narrow_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype of matrix products under autocast; None for float32."""
    if precision != "auto":
        dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        return dtypes.get(precision)
    if device.type != "cuda":
        return None
    # Earlier GPUs, such as V100 and T4, have no products in bfloat16.
    is_early = torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if is_early else torch.bfloat16


def has_weight_copies(config: TrainConfig, context: DistributedContext) -> bool:
    """Return whether weights are cast once an update; see ``training.bfloat16_weights``."""
    settings, device = config.training, context.device
    if settings.bfloat16_weights == "auto":
        return reason_for_autocast(config, device, context.size) is None
    if settings.bfloat16_weights and not is_bfloat16(settings.precision, device):
        raise ValueError(
            "`training.bfloat16_weights` must be false or auto where matrix products are not in "
            f"bfloat16, but is true with training.precision {settings.precision} on {device.type}: "
            "leave it out, or set training.precision=bfloat16."
        )
    return settings.bfloat16_weights


def check_residual_stream(config: TrainConfig, device: torch.device) -> None:
    """Refuse a narrow residual stream where nothing is narrower than float32."""
    precision = config.training.precision
    if not config.model.residual_in_fp32 and not is_bfloat16(precision, device):
        raise ValueError(
            "`model.residual_in_fp32` must be true where matrix products are in float32, but is "
            f"false with training.precision {precision} on {device.type}: leave it out, or set "
            "training.precision=bfloat16."
        )


def reason_for_autocast(config: TrainConfig, device: torch.device, size: int) -> str | None:
    """Return why ``bfloat16_weights: auto`` leaves casts to autocast on ``size`` ranks, or None."""
    settings = config.training
    if not is_bfloat16(settings.precision, device):
        dtype = narrow_dtype(settings.precision, device) or torch.float32
        return f"precision is {str(dtype).removeprefix('torch.')} on {device.type}"
    if device.type == "cpu":
        return "a CPU gains nothing from fewer launches"
    if settings.strategy == "fsdp2" and size > 1:
        return "fsdp2 casts the weights that it gathers"
    return None


def is_sharded(state: TrainState) -> bool:
    return isinstance(state.model, FSDPModule)


@contextmanager
def full_weights(state: TrainState, model: nn.Module) -> Iterator[None]:
    """Give a plain model the current weights, on the device; all ranks enter the block."""
    if not is_sharded(state):
        yield
        return
    model.to(state.context.device)
    gather(state.model, model)
    try:
        yield
    finally:
        model.cpu()


def average_over_ranks(state: TrainState, context: DistributedContext) -> None:
    """Make all ranks equal before a validation or a checkpoint."""
    average = state.average
    state.averager.synchronize([] if average is None else average.average.values())
    average_each(state.statistics, context)


class SynchronousStrategy:
    """Provides the iterator of steps, the sync points and the rule to stop.

    Every step is a sync point.
    """

    # Phase of a rank that waits for its next micro-batches.
    waiting_phase = LOADING
    # Whether a line is logged at each sync point.
    logs_sync_points = False
    # Groups that do not wait for each other.
    learners = 1

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
        self, loader: "Loader", state: TrainState, progress: RunProgress
    ) -> "AbstractContextManager[Iterator[StepBatch | None]]":
        """Return an iterator of this rank's steps; None where ranks have to be synchronized."""
        # A generator, so that closing it ends the data workers.
        return closing(cast("Generator[StepBatch | None]", loader.steps(*progress.position)))

    def steps_made(self, progress: RunProgress) -> int:
        return progress.step

    def step_number(self, data: "StepBatch", progress: RunProgress) -> int:
        """Return the number of the global step that data belong to, from 0."""
        return progress.step

    def must_stop(self, stop: StopRequest, progress: RunProgress) -> bool:
        """Return whether this rank requests a stop after the step that begins now."""
        settings, step = self._config.training, progress.step + 1
        # After the last step there is nothing to train without the freeze.
        ends_freeze = step == settings.freeze_steps and step < settings.known_steps
        return bool(stop) or step == settings.stop_at or ends_freeze

    def has_progress(self, state: TrainState) -> bool:
        """Return whether all steps were worth enough reference steps, by AdaScale."""
        last = self._config.training.known_steps
        return state.adascale is not None and state.adascale.progress >= last

    def finish(self, data: "StepBatch", progress: RunProgress, *, stopping: bool) -> None:
        progress.step += 1
        progress.epoch, progress.position = data.epoch, data.next_position
        self.is_stopping = stopping

    def is_sync_point(self, data: "StepBatch | None") -> bool:
        return True

    def synchronize(self, state: TrainState, progress: RunProgress) -> bool:
        """Make all ranks equal after None from `steps`; return whether some were lost."""
        return False

    def metrics(self, progress: RunProgress, watchdog: Watchdog, data: "StepBatch | None") -> dict:
        """Return fields of metrics.jsonl about the speed of ranks; only rank 0 calls this."""
        return dict(watchdog.slowest())
