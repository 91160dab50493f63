"""One training step, in the order in which it happens."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from effasr import ranges
from effasr.data.batch import Batch
from effasr.distributed.batch_norm import restore_unless
from effasr.distributed.process_group import World
from effasr.distributed.replicate import without_exchange
from effasr.optim.adamw import apply_update
from effasr.optim.ema import WeightAverage
from effasr.training.counts import Counts, HostCopy
from effasr.training.graph import MicroBatchGraph
from effasr.training.objective import Objective


@dataclass(frozen=True, slots=True)
class Trainee:
    """All that a step reads and changes.

    Attributes:
        model: Replicated where there are several ranks.
        optimizer: Of the model's parameters.
        learning_rate: Of a step, counted from 0.
        objective: Weighs the losses.
        average: Running average of the weights, or None.
        statistics: Of the model's batch norms.
        world: The ranks.
        autocast: Makes the context in which the forward runs.
        seed: Of the run.
        clip: Largest norm of the gradient.
        label_smoothing: Of the cross-entropy.
        graph: Replays the micro-batches; None to run each.
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
    graph: MicroBatchGraph | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step leaves behind for the log; reading ``values`` waits until it is computed.

    Attributes:
        step: Counted from 0.
        lr: Learning rate.
        counts: Of all ranks together; known as soon as the step has begun.
        values: float32 (8,): loss, cross-entropy, CTC, transducer, penalty, norm of the gradient
            before clipping, whether all was finite and the update made, whether the penalty was on.
        micro_batches: Of this rank, each with the loss of its utterances, float32 (N,), on the
            device.
    """

    step: int
    lr: float
    counts: HostCopy
    values: HostCopy
    micro_batches: list[tuple[Batch, Tensor]]


def train_step(
    trainee: Trainee, micro_batches: Sequence[Batch], step: int, *, stopping: bool = False
) -> StepReport:
    """Update the weights once, by the mean loss over all micro-batches of all ranks.

    The host queues the work and does not wait for it. A loss or gradient that is not finite
    leaves the weights, the statistics and the optimizer as they were, on every rank.

    Args:
        trainee: What is trained.
        micro_batches: Of this rank: number r, r + W, ... of the global step. Not empty.
        step: Number of the global step since the beginning of the run, from 0.
        stopping: Whether this rank was asked to stop; the others learn it from the counts.
    """
    world, objective = trainee.world, trainee.objective
    run = trainee.graph or partial(run_micro_batch, trainee)
    with ranges.range("counts"):
        counts = world.sum(Counts.of(micro_batches, world, stopping).tensor(world.device))
        counts_seen = HostCopy(counts)
    kept = [statistic.clone() for statistic in trainee.statistics]
    parts = torch.zeros(5, device=world.device)
    losses_seen = []
    for index, batch in enumerate(micro_batches):
        torch.manual_seed(micro_batch_seed(trainee.seed, step, world.rank + index * world.size))
        with without_exchange(trainee.model, index < len(micro_batches) - 1):
            share, per_utterance = run(batch, counts)
        parts += share
        losses_seen.append((batch, per_utterance))
    with ranges.range("update"):
        parts = world.sum(parts)
        norm = nn.utils.clip_grad_norm_(trainee.model.parameters(), trainee.clip)
        finite = parts.isfinite().all() & norm.isfinite()
        values_seen = HostCopy(torch.stack([*parts, norm, finite, objective.is_guided]))
        lr = _update(trainee, step, finite)
        restore_unless(finite, trainee.statistics, kept)
        objective.observe(parts[2], finite & (Counts.targets_of(counts)[1] > 0))
    return StepReport(step, lr, counts_seen, values_seen, losses_seen)


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
    world, objective = trainee.world, trainee.objective
    with ranges.range("forward"), trainee.autocast():
        losses = trainee.model(
            batch.to(world.device),
            label_smoothing=trainee.label_smoothing,
            guided_sigma=objective.sigma,
        )
        share = objective.parts(losses, *Counts.targets_of(counts))
    with ranges.range("backward"):
        # Gradients are averaged over the ranks, but the loss is a mean over all of them.
        (share[0] * world.size).backward()
    return share.detach(), losses.per_utterance


def _update(trainee: Trainee, step: int, finite: Tensor) -> float:
    """Move the weights, where ``finite``, and their average; return the learning rate."""
    lr = trainee.learning_rate(step)
    for group in trainee.optimizer.param_groups:
        group["lr"] = lr
    apply_update(trainee.optimizer, finite)
    # A recorded graph adds to gradients where they were when it was recorded.
    trainee.optimizer.zero_grad(set_to_none=trainee.graph is None)
    if trainee.average is not None:
        trainee.average.update(step)
    return lr


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """The seed of dropout and augmentation in micro-batch ``index`` of a global step.

    It depends on nothing else: neither on how many ranks there are, nor on what ran before.
    """
    digest = hashlib.blake2b(struct.pack("<qqq", seed, step, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
