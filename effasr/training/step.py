"""One training step, in execution order."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from effasr import ranges
from effasr.data.batch import Batch, BatchTransfer
from effasr.distributed.averager import Averager
from effasr.distributed.batch_norm import restore_unless
from effasr.distributed.fsdp import full_tensor
from effasr.distributed.grad_sync import GradientSync
from effasr.distributed.process_group import DistributedContext
from effasr.model.encoder import FastConformerEncoder
from effasr.model.losses import Losses
from effasr.optim.adamw import apply_update, clear_gradients, set_learning_rate
from effasr.optim.adascale import AdaScale, Reading
from effasr.optim.ema import WeightAverage
from effasr.optim.fused_adamw import FusedAdamW
from effasr.optim.loss_scale import LossScale
from effasr.training import cuda_graph
from effasr.training.cuda_graph import MicroBatchGraph
from effasr.training.fault_tolerance.oom_recovery import (
    Failure,
    OOMRecovery,
    OutOfMemory,
    Piece,
    attempt,
    gradients_of,
)
from effasr.training.fault_tolerance.phase_tracker import PhaseTracker
from effasr.training.loss import LOSSES, Objective
from effasr.training.seeds import micro_batch_seed, sample
from effasr.training.step_stats import HostCopy, StepCosts, StepCounts
from effasr.training.strategies.weight_copies import WeightCopies
from effasr.training.untranscribed import teacher
from effasr.training.untranscribed.teacher import Teacher

_FIGURES = (*LOSSES, "grad_norm", "finite", "guided_on", "splits")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    # Maps the number of earlier updates to the learning rate.
    learning_rate: Callable[[int], float]
    autocast: Callable[[], AbstractContextManager]
    costs: StepCosts
    seed: int
    clip: float
    label_smoothing: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """Components that a step uses and updates."""

    config: StepConfig
    # The ranks that make the step together.
    context: DistributedContext
    # With its wrapper where ranks exchange gradients.
    model: nn.Module
    optimizer: torch.optim.Optimizer
    objective: Objective
    grad_sync: GradientSync
    # Averages the weights of ranks that make updates of their own.
    averager: Averager = field(default_factory=Averager)
    # Running statistics of the model's batch norms.
    statistics: Sequence[Tensor] = ()
    average: WeightAverage | None = None
    adascale: AdaScale | None = None
    # None to cast at every use.
    weights: WeightCopies | None = None
    # None to run each micro-batch.
    graph: MicroBatchGraph | None = None
    # None to copy each batch in turn with the work of the device.
    transfer: BatchTransfer | None = None
    phases: PhaseTracker = field(default_factory=PhaseTracker)
    teacher: Teacher | None = None
    # In float16.
    loss_scale: LossScale | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """Results of a step for the log, still on the way from the device."""

    # From 0.
    step: int
    # With AdaScale, before its factor.
    lr: float
    # Sums over all ranks, as `StepCounts.tensor`; available from the start of the step.
    counts: HostCopy
    # One for each of `_FIGURES`, float32.
    values: HostCopy
    # Micro-batches of this rank, or their pieces, with the loss of each utterance, (N,).
    micro_batches: list[tuple[Batch, Tensor]]
    # (3,), with AdaScale: gain, progress, and factor of the learning rate.
    gain: Reading | None = None

    def read(self) -> dict[str, float]:
        """Wait for the step; return its figures by name.

        They are `LOSSES` (means over the step), ``grad_norm`` before clipping, ``finite`` (whether
        the update was made), ``guided_on``, and ``splits`` after out-of-memory errors on all ranks.
        """
        return dict(zip(_FIGURES, self.values.read(), strict=True))


def train_step(
    state: TrainState,
    micro_batches: Sequence[Batch],
    step: int,
    *,
    stopping: bool = False,
    due: int = 0,
    places: Sequence[int] | None = None,
) -> StepReport:
    """Update the weights once, by the mean loss over all micro-batches of all ranks.

    The host queues the work and does not wait for it. A loss or gradient that is not finite
    leaves the weights, the statistics and the optimizer as they were, on every rank. A micro-batch
    that does not fit in memory is computed in pieces, by `OOMRecovery`. ``places`` are the indices
    of this rank's micro-batches in the global step, by default r, r + W, ... on rank r of W.
    """
    config, context, adascale = state.config, state.context, state.adascale
    labelled = None
    if state.teacher is not None:
        result = attempt(partial(state.teacher.label, micro_batches, step))
        if isinstance(result, Failure):
            raise OutOfMemory(
                f"there is not enough memory to label micro-batches ({result.reason}): lower "
                "data.frame_budget."
            )
        micro_batches, labelled = result
    with ranges.range("counts"):
        counted = StepCounts.from_batches(micro_batches, context, stopping, config.costs, due)
        counts = context.all_reduce(counted.tensor(context.device, labelled))
        counts_copy = HostCopy(counts)
    if places is None:
        places = [context.rank + context.size * index for index in range(len(micro_batches))]
    # Copies the statistics, so it has to be made before the first micro-batch.
    recovery = _oom_recovery(state, counts)
    is_local = state.averager.is_local(step)
    state.grad_sync.begin(state.phases.wait_for_ranks)
    state.averager.before(step)
    if state.weights is not None:
        state.weights.refresh()
    if adascale is not None:
        adascale.begin()
    _sample_attention_context(state, step)
    for index, batch in enumerate(micro_batches):
        exchanging = index + 1 == len(micro_batches) and not is_local
        piece = Piece(batch, micro_batch_seed(config.seed, step, places[index]))
        run = partial(
            _accumulate_gradient, state, batch, counts, exchanging=exchanging, is_first=index == 0
        )
        recovery.run(piece, run, exchanging=exchanging)
    state.phases.wait_for_ranks()
    if not is_local:
        state.grad_sync.all_reduce()
    with ranges.range("update"):
        if state.loss_scale is not None:
            state.loss_scale.unscale(state.model.parameters())
        sums = _sum_over_ranks(state, recovery, is_local=is_local)
        losses, splits, squares, local_norm = sums.split(_SUM_SIZES)
        norm = local_norm[0].sqrt() if is_local else clip_gradient(state)
        finite = sums.isfinite().all() & norm.isfinite()
        figures = [*losses, norm, finite, state.objective.guided_on, splits[0]]
        values_copy = HostCopy(torch.stack(figures))
        factor, made = None, step
        targets, monotonic_targets = StepCounts.targets_of(counts)
        if adascale is not None:
            # Waits only for the step before, while the backward of this one runs.
            made = int(adascale.advance())
            whole, is_whole = None if is_local else norm, splits[0] == 0
            factor = adascale.update(squares, targets, whole, finite, is_whole, step)
        lr = _update(state, step, config.learning_rate(made), factor, finite)
        if state.loss_scale is not None:
            state.loss_scale.update(finite)
        restore_unless(finite, state.statistics, recovery.kept)
        state.averager.after(step)
        state.objective.observe(losses[LOSSES.index("ctc")], finite & (monotonic_targets > 0))
    utterance_losses = [(outcome.piece.batch, outcome.losses) for outcome in recovery.outcomes]
    gain = None if adascale is None else adascale.reading
    return StepReport(step, lr, counts_copy, values_copy, utterance_losses, gain)


def _sample_attention_context(state: TrainState, step: int) -> None:
    """Pick this step's attention context."""
    encoder = getattr(state.grad_sync.module, "encoder", None)
    if isinstance(encoder, FastConformerEncoder) and len(encoder.config.context) > 1:
        encoder.train_with(sample(encoder.config.context, state.config.seed, step))


def run_micro_batch(
    state: TrainState,
    batch: Batch,
    counts: Tensor,
    *,
    exchanging: bool = False,
    replace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Add the gradient of one micro-batch to that of the step, which has these `StepCounts`.

    ``replace``: whether gradients are there that this micro-batch replaces where it can. Return its
    share of each of `LOSSES`, (6,), and the loss of each of its utterances, (N,).
    """
    is_text = batch.source is not None
    with _weights_in_use(state, accumulate=not exchanging, replace=replace, is_text=is_text):
        share, utterance_losses = _forward(state, state.model, batch, counts)
        with ranges.range("backward"):
            _to_differentiate(share, state).backward()
    return _stacked(share), utterance_losses


def _accumulate_gradient(
    state: TrainState, batch: Batch, counts: Tensor, *, exchanging: bool, is_first: bool
) -> tuple[Tensor, Tensor]:
    """Run or replay `run_micro_batch`; the last micro-batch of a step exchanges the gradients."""
    state.phases.compute(batch)
    sync = nullcontext() if exchanging else state.grad_sync.no_sync()
    adascale = state.adascale
    measured = nullcontext() if adascale is None else adascale.sample(batch.num_targets)
    run = partial(run_micro_batch, state, exchanging=exchanging)
    if state.graph is not None:
        weights = state.weights if is_first else None
        run = partial(state.graph, replace=weights is not None)
        if weights is not None:
            weights.clear_others(is_text=batch.source is not None)
    if state.transfer is not None:
        batch = state.transfer(batch)
    with sync, measured:
        share, utterance_losses = run(batch, counts)
    return share, utterance_losses


def _forward(
    state: TrainState, model: Callable[..., Losses], batch: Batch, counts: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    with ranges.range("forward"), state.config.autocast():
        losses = model(
            batch.to(state.context.device),
            label_smoothing=state.config.label_smoothing,
            guided_sigma=state.objective.guided_sigma,
            consistency=state.objective.config.consistency_weight > 0,
        )
        share = state.objective.weigh(losses, StepCounts.targets_of(counts))
    return share, losses.per_utterance


def _to_differentiate(share: dict[str, Tensor], state: TrainState) -> Tensor:
    loss, ranks = share["loss"], state.context.size
    if state.loss_scale is not None:
        loss = loss * state.loss_scale.scale
    # Gradients are averaged over the ranks, but the loss is a mean over all of them.
    return loss * ranks if ranks > 1 else loss


def _stacked(share: dict[str, Tensor]) -> Tensor:
    return torch.stack([share[name].detach() for name in LOSSES])


def _weights_in_use(state: TrainState, **options: bool) -> AbstractContextManager:
    return nullcontext() if state.weights is None else state.weights.in_use(**options)


def _oom_recovery(state: TrainState, counts: Tensor) -> OOMRecovery:
    sync = state.grad_sync

    def gradient(batch: Batch) -> tuple[list[Tensor | None], Tensor, Tensor]:
        with _weights_in_use(state):
            # The uncompiled forward, because pieces have shapes of their own.
            share, utterance_losses = _forward(state, sync.module.forward, batch, counts)
            with ranges.range("backward"):
                gradients = gradients_of(_to_differentiate(share, state), sync.parameters)
        return gradients, _stacked(share), utterance_losses

    reason = sync.unsplittable_reason if state.graph is None else cuda_graph.UNSPLITTABLE_REASON
    if state.teacher is not None:
        reason = teacher.UNSPLITTABLE_REASON
    return OOMRecovery(gradient, sync, state.statistics, reason, state.context.device)


_SUM_SIZES = (len(LOSSES), 1, 4, 1)
"""`LOSSES`, splits, four sums of AdaScale, and the squared norm where ranks make own updates."""


def _sum_over_ranks(state: TrainState, recovery: OOMRecovery, *, is_local: bool) -> Tensor:
    """Return what all ranks need to know, in one all-reduce."""
    sums = torch.zeros(sum(_SUM_SIZES), device=state.context.device)
    losses, splits, squares, local_norm = sums.split(_SUM_SIZES)
    for outcome in recovery.outcomes:
        losses += outcome.parts
    # An assignment would wait for the GPU, as it copies a number from the host.
    splits.fill_(recovery.splits)
    if is_local:
        # The ranks decide together whether to make an update, but each clips its own gradient.
        norm = clip_gradient(state)
        local_norm[0] = norm**2 / state.context.size
        if state.adascale is not None:
            targets = sum(outcome.piece.batch.num_targets for outcome in recovery.outcomes)
            state.adascale.see_rank(norm, targets)
    if state.adascale is not None:
        squares[:] = state.adascale.sums
    return state.context.all_reduce(sums)


def clip_gradient(state: TrainState) -> Tensor:
    """Scale the gradient down to the largest norm allowed; return its norm before, ().

    `FusedAdamW` scales it in the update.
    """
    optimizer = state.optimizer
    if isinstance(optimizer, FusedAdamW):
        optimizer.norm = optimizer.gradient_norm(state.model.parameters())
        optimizer.clip = state.config.clip
        return optimizer.norm
    return full_tensor(nn.utils.clip_grad_norm_(state.model.parameters(), state.config.clip))


def _update(
    state: TrainState, step: int, lr: float, factor: Tensor | None, finite: Tensor
) -> float:
    """Update the weights, where ``finite``, and their average."""
    optimizer, average = state.optimizer, state.average
    set_learning_rate(optimizer, lr, factor)
    is_fused = isinstance(optimizer, FusedAdamW)
    if is_fused and average is not None:
        optimizer.average_share = average.share(step)
    with ranges.range("optimizer"):
        apply_update(optimizer, finite)
    # A CUDA graph accumulates gradients at the addresses of the time of recording.
    replaced = set() if state.weights is None else state.weights.replaced
    clear_gradients(optimizer, keep_addresses=state.graph is not None, replaced=replaced)
    if average is not None and not is_fused:
        average.update(step)
    return lr
