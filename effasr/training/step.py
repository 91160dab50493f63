"""One training step, in the order in which it happens."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from effasr import ranges
from effasr.data.batch import Batch
from effasr.data.sampling.cost import CostModel
from effasr.distributed.averager import Averager
from effasr.distributed.batch_norm import restore_unless
from effasr.distributed.ddp import without_exchange
from effasr.distributed.ddp_comm_hook import GradientExchange
from effasr.distributed.flat_grad_all_reduce import GradientSum
from effasr.distributed.fsdp import whole
from effasr.distributed.process_group import World
from effasr.model.losses import Losses
from effasr.optim.adamw import apply_update, set_learning_rate
from effasr.optim.adascale import AdaScale, Reading
from effasr.optim.ema import WeightAverage
from effasr.training.cuda_graph.graph import MicroBatchGraph
from effasr.training.fault_tolerance.oom_recovery import (
    Failure,
    Outcome,
    OutOfMemory,
    Piece,
    attempt,
    gradients_of,
    redo,
)
from effasr.training.fault_tolerance.phase_tracker import Activity
from effasr.training.loss import Objective
from effasr.training.step_stats import Counts, HostCopy


@dataclass(frozen=True, slots=True)
class Trainee:
    """All that a step reads and changes.

    Attributes:
        model: Replicated or sharded where there are several ranks.
        optimizer: Of the model's parameters.
        learning_rate: Of an update, by how many were made before it.
        objective: Weighs the losses.
        average: Running average of the weights, or None.
        statistics: Of the model's batch norms.
        world: The ranks.
        autocast: Makes the context in which the forward runs.
        seed: Of the run.
        clip: Largest norm of the gradient.
        label_smoothing: Of the cross-entropy.
        cost: What an utterance is to compute, as of a model that is trained throughout; see
            `effasr.model.learning_cost`.
        graph: Replays the micro-batches; None to run each.
        exchange: Of the gradients, where there are several ranks and no graph.
        total: Of the gradients, where there are several ranks and a graph.
        text_cost: What a text pair is to compute; None without a text encoder.
        again: Of both, what activation checkpointing computes again; None without it.
        adascale: Measures what a step is worth, or None.
        averager: Brings ranks together that make updates of their own; or None.
        activity: Is told what is computed.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    learning_rate: Callable[[int], float]
    objective: Objective
    average: WeightAverage | None
    statistics: list[Tensor]
    world: World
    autocast: Callable[[], AbstractContextManager]
    seed: int
    clip: float
    label_smoothing: float
    cost: CostModel
    graph: MicroBatchGraph | None = None
    exchange: GradientExchange | None = None
    total: GradientSum | None = None
    text_cost: CostModel | None = None
    again: tuple[CostModel, CostModel | None] | None = None
    adascale: AdaScale | None = None
    averager: Averager | None = None
    activity: Activity = field(default_factory=Activity)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step leaves behind for the log; reading ``values`` waits until it is computed.

    Attributes:
        step: Counted from 0.
        lr: Learning rate; with AdaScale, before its factor.
        counts: Of all ranks together; known as soon as the step has begun.
        values: float32 (9,): loss, cross-entropy, CTC, transducer, penalty, norm of the gradient
            before clipping, whether all was finite and the update made, whether the penalty was on,
            how often a rank split a micro-batch for want of memory.
        micro_batches: Of this rank, or their pieces, each with the loss of its utterances, float32
            (N,), on the device.
        gain: Of AdaScale, (3,): gain, progress, and factor of the learning rate.
    """

    step: int
    lr: float
    counts: HostCopy
    values: HostCopy
    micro_batches: list[tuple[Batch, Tensor]]
    gain: Reading | None = None


def train_step(
    trainee: Trainee,
    micro_batches: Sequence[Batch],
    step: int,
    *,
    stopping: bool = False,
    places: Sequence[int] | None = None,
) -> StepReport:
    """Update the weights once, by the mean loss over all micro-batches of all ranks.

    The host queues the work and does not wait for it. A loss or gradient that is not finite
    leaves the weights, the statistics and the optimizer as they were, on every rank. Where memory
    does not suffice for a micro-batch, this rank computes it in pieces; see
    `effasr.training.fault_tolerance.oom_recovery`.

    Args:
        trainee: What is trained.
        micro_batches: Of this rank: number r, r + W, ... of the global step. Not empty.
        step: Number of the global step since the beginning of the run, from 0.
        stopping: Whether this rank was asked to stop; the others learn it from the counts.
        places: Numbers of its micro-batches in the global step; by default r, r + W, ... of its
            rank r of W.

    Raises:
        OutOfMemory: Memory does not suffice for a single utterance, or for a recorded micro-batch.
    """
    world, objective = trainee.world, trainee.objective
    run = trainee.graph or partial(run_micro_batch, trainee)
    with ranges.range("counts"):
        costs = trainee.cost, trainee.text_cost, trainee.again
        counted = Counts.of(micro_batches, world, stopping, *costs)
        counts = world.sum(counted.tensor(world.device))
        counts_seen = HostCopy(counts)
    kept = [statistic.clone() for statistic in trainee.statistics]
    if trainee.exchange is not None:
        trainee.exchange.begin(trainee.activity.meet)
    adascale = trainee.adascale
    if adascale is not None:
        adascale.begin()
    if places is None:
        places = range(world.rank, world.rank + world.size * len(micro_batches), world.size)
    averager = trainee.averager
    is_local = averager is not None and averager.is_local(step)
    if averager is not None:
        averager.before(step)
    done: list[list[Outcome]] = []
    splits = 0
    for index, batch in enumerate(micro_batches):
        seed = micro_batch_seed(trainee.seed, step, places[index])
        piece = Piece(batch, seed)
        exchanging = index == len(micro_batches) - 1 and not is_local
        torch.manual_seed(seed)
        trainee.activity.compute(batch)
        with without_exchange(trainee.model, not exchanging), sampling(adascale, batch):
            result = attempt(partial(run, batch, counts))
        if isinstance(result, Failure):
            done, more = _recover(trainee, done, piece, counts, kept, result, exchanging=exchanging)
            splits += more
        else:
            done.append([Outcome(piece, *result)])
    outcomes = [outcome for pieces in done for outcome in pieces]
    trainee.activity.meet()
    if trainee.total is not None and not is_local:
        with ranges.range("exchange"):
            trainee.total()
    with ranges.range("update"):
        parts = torch.zeros(9, device=world.device)
        for outcome in outcomes:
            parts[:5] += outcome.parts
        parts[5] = splits
        if adascale is not None:
            parts[6:8] = adascale.sums
        if is_local:
            # The ranks decide together whether to make an update, but each by its own gradient.
            parts[8] = clip(trainee) ** 2 / world.size
        parts = world.sum(parts)
        splits_of_all = parts[5]
        norm = parts[8].sqrt() if is_local else clip(trainee)
        finite = parts.isfinite().all() & norm.isfinite()
        seen = [*parts[:5], norm, finite, objective.is_guided, splits_of_all]
        values_seen = HostCopy(torch.stack(seen))
        lr, factor = _rate(trainee, step), None
        if adascale is not None:
            targets = Counts.targets_of(counts)[0]
            factor = adascale.update(parts[6:8], targets, norm, finite, splits_of_all == 0)
        _update(trainee, step, lr, factor, finite)
        restore_unless(finite, trainee.statistics, kept)
        if averager is not None:
            averager.after(step)
        objective.observe(parts[2], finite & (Counts.targets_of(counts)[1] > 0))
    losses_seen = [(outcome.piece.batch, outcome.losses) for outcome in outcomes]
    gain = None if adascale is None else adascale.reading
    return StepReport(step, lr, counts_seen, values_seen, losses_seen, gain)


def run_micro_batch(trainee: Trainee, batch: Batch, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Add the gradient of one micro-batch to that of the step.

    Args:
        trainee: What is trained.
        batch: The micro-batch.
        counts: Of the global step, as `Counts.tensor` puts them.

    Returns:
        Its share of loss, cross-entropy, CTC, transducer and penalty, (5,), and the loss of each
        of its utterances, (N,).
    """
    share, losses = _forward(trainee, trainee.model, batch, counts)
    with ranges.range("backward"):
        # Gradients are averaged over the ranks, but the loss is a mean over all of them.
        (share[0] * trainee.world.size).backward()
    return share.detach(), losses


def _forward(
    trainee: Trainee, model: Callable[..., Losses], batch: Batch, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """The parts of the loss of a micro-batch, (5,), and the loss of its utterances, (N,)."""
    objective = trainee.objective
    with ranges.range("forward"), trainee.autocast():
        losses = model(
            batch.to(trainee.world.device),
            label_smoothing=trainee.label_smoothing,
            guided_sigma=objective.sigma,
        )
        share = objective.parts(losses, *Counts.targets_of(counts))
    return share, losses.per_utterance


def _recover(
    trainee: Trainee,
    done: Sequence[Sequence[Outcome]],
    failed: Piece,
    counts: Tensor,
    kept: Sequence[Tensor],
    failure: Failure,
    *,
    exchanging: bool,
) -> tuple[list[list[Outcome]], int]:
    """Compute the step so far once more, its newest micro-batch in pieces.

    Args:
        trainee: What is trained.
        done: What there was before.
        failed: The newest micro-batch.
        counts: Of the global step.
        kept: Statistics of batch norms before the step.
        failure: Why the newest must be split.
        exchanging: Whether its backward was to exchange the gradients.

    Returns:
        What there is now, and how often pieces were split.

    Raises:
        OutOfMemory: See `train_step`.
    """
    if isinstance(trainee.model, FSDPModule):
        raise OutOfMemory(
            f"there is not enough memory for a micro-batch ({failure.reason}), and with "
            "training.strategy fsdp2 it cannot be split, because ranks gather layers together, and "
            "none can begin anew alone: lower data.frame_budget, or set "
            "training.activation_checkpointing=true."
        )
    if trainee.graph is not None:
        raise OutOfMemory(
            f"there is not enough memory for a micro-batch ({failure.reason}), and one that is a "
            "CUDA graph cannot be split: lower data.frame_budget, or set training.cuda_graph=false."
        )
    exchange = trainee.exchange
    model = trainee.model if exchange is None else exchange.module
    parameters = [p for p in trainee.model.parameters() if p.requires_grad]
    if exchange is None or not exchange.begun:
        for parameter in parameters:
            parameter.grad = None

    def gradient(batch: Batch) -> tuple[list[Tensor | None], Tensor, Tensor]:
        # Not as it is compiled, for pieces have shapes of their own.
        share, losses = _forward(trainee, model.forward, batch, counts)
        with ranges.range("backward"):
            gradients = gradients_of(share[0] * trainee.world.size, parameters)
        return gradients, share.detach(), losses

    halves = failed.halves(micro_batch_seed, failure.reason)
    work = [[outcome.piece for outcome in pieces] for pieces in done]
    redone = redo([*work, halves], gradient, micro_batch_seed, trainee.statistics, kept)
    if exchange is not None and exchanging:
        exchange.complete(redone.gradients)
    else:
        for parameter, value in zip(parameters, redone.gradients, strict=True):
            parameter.grad = value
    return redone.outcomes, redone.splits + 1


def clip(trainee: Trainee) -> Tensor:
    """Shorten the gradient, where it is too long; return its norm before."""
    return whole(nn.utils.clip_grad_norm_(trainee.model.parameters(), trainee.clip))


def _rate(trainee: Trainee, step: int) -> float:
    """The learning rate of a step, by what the steps before it were worth."""
    adascale = trainee.adascale
    # Waits for no more than the step before, while this one's backward is under way.
    return trainee.learning_rate(step if adascale is None else int(adascale.advance()))


def _update(trainee: Trainee, step: int, lr: float, factor: Tensor | None, finite: Tensor) -> None:
    """Move the weights, where ``finite``, and their average."""
    set_learning_rate(trainee.optimizer, lr, factor)
    with ranges.range("optimizer"):
        apply_update(trainee.optimizer, finite)
    # A recorded graph adds to gradients where they were when it was recorded.
    trainee.optimizer.zero_grad(set_to_none=trainee.graph is None)
    if trainee.average is not None:
        trainee.average.update(step)


def sampling(adascale: AdaScale | None, batch: Batch) -> AbstractContextManager[None]:
    """While in it, the backward is that of a sample."""
    return nullcontext() if adascale is None else adascale.sample(batch.num_targets)


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """The seed of dropout and augmentation in micro-batch ``index`` of a global step.

    It depends on nothing else: neither on how many ranks there are, nor on what ran before.
    """
    digest = hashlib.blake2b(struct.pack("<qqq", seed, step, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
