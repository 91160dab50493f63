"""One training step, in execution order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from effasr import ranges
from effasr.data.batch import Batch
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
from effasr.training.cuda_graph.graph import UNSPLITTABLE_REASON, MicroBatchGraph
from effasr.training.fault_tolerance.oom_recovery import OOMRecovery, Piece, gradients_of
from effasr.training.fault_tolerance.phase_tracker import PhaseTracker
from effasr.training.loss import Objective
from effasr.training.seeds import drawn, micro_batch_seed
from effasr.training.step_stats import HostCopy, StepCosts, StepCounts
from effasr.training.strategies.weight_copies import WeightCopies
from effasr.training.untranscribed import teacher
from effasr.training.untranscribed.teacher import Teacher


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """Settings of a step.

    Attributes:
        learning_rate: Maps the number of earlier updates to the learning rate.
        autocast: Returns the context in which the forward runs.
        costs: FLOPs of an utterance.
        seed: Seed of the run.
        clip: Largest norm of the gradient.
        label_smoothing: Label smoothing of the cross-entropy.
    """

    learning_rate: Callable[[int], float]
    autocast: Callable[[], AbstractContextManager]
    costs: StepCosts
    seed: int
    clip: float
    label_smoothing: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """Components that a step uses and updates.

    Attributes:
        config: Settings of the step.
        context: The ranks that make the step together.
        model: The model, with its wrapper where ranks exchange gradients.
        optimizer: Optimizer of the model's parameters.
        objective: Weights of the losses.
        grad_sync: Combines the gradients of the ranks.
        averager: Averages the weights of ranks that make updates of their own.
        statistics: Running statistics of the model's batch norms.
        average: Exponential moving average of the weights, or None.
        adascale: Measures the gain of a step, or None.
        weights: Copies of the weights in the precision of autocast; None to cast at every use.
        graph: Replays the micro-batches as a CUDA graph; None to run each.
        phases: Tracks the phase that this rank is in.
        teacher: Labels utterances without text, or None.
    """

    config: StepConfig
    context: DistributedContext
    model: nn.Module
    optimizer: torch.optim.Optimizer
    objective: Objective
    grad_sync: GradientSync
    averager: Averager = field(default_factory=Averager)
    statistics: Sequence[Tensor] = ()
    average: WeightAverage | None = None
    adascale: AdaScale | None = None
    weights: WeightCopies | None = None
    graph: MicroBatchGraph | None = None
    phases: PhaseTracker = field(default_factory=PhaseTracker)
    teacher: Teacher | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """Results of a step for the log; reading ``values`` waits until they are computed.

    Attributes:
        step: Number of the step, counted from 0.
        lr: Learning rate; with AdaScale, before its factor.
        counts: Sums over all ranks, as `StepCounts.tensor`; available from the start of the step.
        values: float32 (9,): loss, cross-entropy, CTC, transducer, penalty, norm of the gradient
            before clipping, whether all was finite and the update made, whether the penalty was on,
            and how often a rank split a micro-batch after an out-of-memory error.
        micro_batches: Micro-batches of this rank, or their pieces, each with the loss of its
            utterances, float32 (N,), on the device.
        gain: (3,), with AdaScale: gain, progress, and factor of the learning rate.
    """

    step: int
    lr: float
    counts: HostCopy
    values: HostCopy
    micro_batches: list[tuple[Batch, Tensor]]
    gain: Reading | None = None


def train_step(
    state: TrainState,
    micro_batches: Sequence[Batch],
    step: int,
    *,
    stopping: bool = False,
    places: Sequence[int] | None = None,
) -> StepReport:
    """Update the weights once, by the mean loss over all micro-batches of all ranks.

    The host queues the work and does not wait for it. A loss or gradient that is not finite
    leaves the weights, the statistics and the optimizer as they were, on every rank. A micro-batch
    that does not fit in memory is computed in pieces; see
    `effasr.training.fault_tolerance.oom_recovery`.

    Args:
        state: Components of the run.
        micro_batches: Micro-batches of this rank. Not empty.
        step: Number of the global step since the beginning of the run, from 0.
        stopping: Whether this rank was asked to stop; the counts inform the other ranks.
        places: Indices of the micro-batches in the global step; by default r, r + W, ... on rank
            r of W.

    Raises:
        OutOfMemory: A single utterance, or a recorded micro-batch, does not fit in memory.
    """
    config, context, adascale = state.config, state.context, state.adascale
    labelled = None
    if state.teacher is not None:
        micro_batches, labelled = state.teacher.label(micro_batches, step)
    with ranges.range("counts"):
        counted = StepCounts.of(micro_batches, context, stopping, config.costs)
        counts = context.all_reduce(counted.tensor(context.device, labelled))
        counts_copy = HostCopy(counts)
    if places is None:
        places = [context.rank + context.size * index for index in range(len(micro_batches))]
    recovery = _oom_recovery(state, counts)
    is_local = state.averager.is_local(step)
    state.grad_sync.begin(state.phases.wait_for_ranks)
    state.averager.before(step)
    if state.weights is not None:
        state.weights.refresh()
    if adascale is not None:
        adascale.begin()
    _draw_context(state, step)
    for index, batch in enumerate(micro_batches):
        exchanging = index + 1 == len(micro_batches) and not is_local
        piece = Piece(batch, micro_batch_seed(config.seed, step, places[index]))
        run = partial(_accumulate_gradient, state, batch, counts, exchanging=exchanging)
        recovery.run(piece, run, exchanging=exchanging)
    state.phases.wait_for_ranks()
    if not is_local:
        state.grad_sync.all_reduce()
    with ranges.range("update"):
        sums, norm = _sum_losses_and_clip(state, recovery, is_local=is_local)
        finite = sums.isfinite().all() & norm.isfinite()
        values = [*sums[:5], norm, finite, state.objective.is_guided, sums[5]]
        values_copy = HostCopy(torch.stack(values))
        lr = _update(state, step, counts, sums, norm, finite)
        restore_unless(finite, state.statistics, recovery.kept)
        state.averager.after(step)
        state.objective.observe(sums[2], finite & (StepCounts.targets_of(counts)[1] > 0))
    losses = [(outcome.piece.batch, outcome.losses) for outcome in recovery.outcomes]
    gain = None if adascale is None else adascale.reading
    return StepReport(step, lr, counts_copy, values_copy, losses, gain)


def _draw_context(state: TrainState, step: int) -> None:
    """Give the encoder the context of this step, if it is trained with several."""
    encoder = getattr(state.grad_sync.module, "encoder", None)
    if isinstance(encoder, FastConformerEncoder) and len(encoder.config.context) > 1:
        encoder.train_with(drawn(encoder.config.context, state.config.seed, step))


def run_micro_batch(
    state: TrainState, batch: Batch, counts: Tensor, *, exchanging: bool = False
) -> tuple[Tensor, Tensor]:
    """Add the gradient of one micro-batch to that of the step.

    Args:
        state: Components of the run.
        batch: The micro-batch.
        counts: Counts of the global step, as `StepCounts.tensor`.
        exchanging: Whether ranks exchange gradients during the backward.

    Returns:
        Its share of loss, cross-entropy, CTC, transducer and penalty, (5,), and the loss of each
        of its utterances, (N,).
    """
    with _weights_in_use(state, accumulate=not exchanging):
        share, losses = _forward(state, state.model, batch, counts)
        with ranges.range("backward"):
            _total(share, state.context).backward()
    return share.detach(), losses


def _accumulate_gradient(
    state: TrainState, batch: Batch, counts: Tensor, *, exchanging: bool
) -> tuple[Tensor, Tensor]:
    """Run or replay `run_micro_batch`; the last micro-batch of a step exchanges the gradients."""
    state.phases.compute(batch)
    sync = nullcontext() if exchanging else state.grad_sync.no_sync()
    adascale = state.adascale
    sample = nullcontext() if adascale is None else adascale.sample(batch.num_targets)
    run = state.graph or partial(run_micro_batch, state, exchanging=exchanging)
    with sync, sample:
        share, losses = run(batch, counts)
    return share, losses


def _forward(
    state: TrainState, model: Callable[..., Losses], batch: Batch, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss parts of a micro-batch, (5,), and the losses of its utterances, (N,)."""
    with ranges.range("forward"), state.config.autocast():
        losses = model(
            batch.to(state.context.device),
            label_smoothing=state.config.label_smoothing,
            guided_sigma=state.objective.sigma,
        )
        share = state.objective.parts(losses, StepCounts.targets_of(counts))
    return share, losses.per_utterance


def _total(share: Tensor, context: DistributedContext) -> Tensor:
    """Return the loss to differentiate, ()."""
    # Gradients are averaged over the ranks, but the loss is a mean over all of them.
    return share[0] * context.size if context.size > 1 else share[0]


def _weights_in_use(state: TrainState, *, accumulate: bool = False) -> AbstractContextManager:
    weights = state.weights
    return nullcontext() if weights is None else weights.in_use(accumulate=accumulate)


def _oom_recovery(state: TrainState, counts: Tensor) -> OOMRecovery:
    """Return the recovery of a step, which has to be made before its first micro-batch."""
    sync = state.grad_sync

    def gradient(batch: Batch) -> tuple[list[Tensor | None], Tensor, Tensor]:
        with _weights_in_use(state):
            # The uncompiled forward, because pieces have shapes of their own.
            share, losses = _forward(state, sync.module.forward, batch, counts)
            with ranges.range("backward"):
                gradients = gradients_of(_total(share, state.context), sync.parameters)
        return gradients, share.detach(), losses

    reason = sync.unsplittable_reason if state.graph is None else UNSPLITTABLE_REASON
    if state.teacher is not None:
        reason = teacher.UNSPLITTABLE_REASON
    return OOMRecovery(gradient, sync, state.statistics, reason, state.context.device)


def _sum_losses_and_clip(
    state: TrainState, recovery: OOMRecovery, *, is_local: bool
) -> tuple[Tensor, Tensor]:
    """Clip the gradient.

    Returns:
        Sums over the ranks, (9,): five loss parts, splits, two of AdaScale, one spare; and the norm
        of the gradient before clipping, ().
    """
    sums = torch.zeros(9, device=state.context.device)
    for outcome in recovery.outcomes:
        sums[:5] += outcome.parts
    sums[5] = recovery.splits
    if state.adascale is not None:
        sums[6:8] = state.adascale.sums
    if is_local:
        # The ranks decide together whether to make an update, but each clips its own gradient.
        sums[8] = clip_gradient(state) ** 2 / state.context.size
    sums = state.context.all_reduce(sums)
    return sums, sums[8].sqrt() if is_local else clip_gradient(state)


def clip_gradient(state: TrainState) -> Tensor:
    """Scale the gradient down to the largest norm allowed; return its norm before, ()."""
    return full_tensor(nn.utils.clip_grad_norm_(state.model.parameters(), state.config.clip))


def _update(
    state: TrainState, step: int, counts: Tensor, sums: Tensor, norm: Tensor, finite: Tensor
) -> float:
    """Update the weights, where ``finite``, and their average; return the learning rate."""
    made, factor = step, None
    if state.adascale is not None:
        # Waits only for the step before, while the backward of this one runs.
        made = int(state.adascale.advance())
        targets = StepCounts.targets_of(counts)[0]
        factor = state.adascale.update(sums[6:8], targets, norm, finite, sums[5] == 0)
    lr = state.config.learning_rate(made)
    set_learning_rate(state.optimizer, lr, factor)
    with ranges.range("optimizer"):
        apply_update(state.optimizer, finite)
    # A CUDA graph accumulates gradients at the addresses of the time of recording.
    clear_gradients(state.optimizer, keep_addresses=state.graph is not None)
    if state.average is not None:
        state.average.update(step)
    return lr
