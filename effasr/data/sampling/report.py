"""Measures a plan: padding, FLOPs, and the imbalance of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from effasr.checks import check
from effasr.data.batch import StaticShape
from effasr.data.sampling.cost import CostModel
from effasr.data.sampling.packing import imbalance
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Figures of one or more planned epochs; shares are fractions of one.

    A batch is a micro-batch, which one rank runs; a step is a global step of all ranks.
    """

    steps: int  # Global steps
    planned: int  # Utterances planned, counted with repetitions
    deferred: int  # Utterances that the last epoch leaves out or to the next
    batch_utterances: float  # Mean utterances of a batch
    batch_audio_seconds: float  # Mean seconds of audio of a batch
    padding_frames: float  # Share of the encoder's rows that are padding
    padding_tokens: float  # Share of the decoder's rows that are padding
    padding_flops: float  # Share of the FLOPs spent on padding
    # Share of the cells (frames times tokens) of a transducer's lattices that are padding
    padding_cells: float
    # Mean over steps of the FLOPs of the busiest rank relative to the mean of the ranks, minus 1
    rank_imbalance_mean: float
    rank_imbalance_p99: float  # 99th percentile of the same
    # Share of the steps in which the ranks drew different buckets; None for a strategy without
    # buckets, and where each epoch has its own
    bucket_mismatch: float | None
    step_flops: float  # Mean forward FLOPs of a step
    flops_per_audio_hour: float  # Forward FLOPs per hour of audio


def measure(
    plans: Sequence[EpochPlan],  # with equal micro-batches per step
    lengths: UtteranceLengths,
    seconds: np.ndarray,  # float64 (n,), durations of the utterances
    *,
    cost: CostModel,
    world_size: int,  # number of ranks; micro-batch m of a step belongs to rank m modulo it
    shape: StaticShape | None,  # None for padded micro-batches
    # int (n,), the bucket of each utterance; None without buckets, or where an epoch has its own
    buckets: np.ndarray | None = None,
) -> PlanReport:
    """Add up what plans execute and what the utterances need.

    With a static shape, every micro-batch has the rows of its budgets; padding rows cost the linear
    terms only, since no utterance attends to them. Otherwise micro-batches are padded: each of
    their utterances costs as much as one with the batch's most frames and most tokens. If ranks
    cannot share a step evenly, some have an empty micro-batch in its last round.
    """
    check(plans, "plans", "hold at least one plan", "empty")
    micro_batches = plans[0].micro_batches
    check(world_size >= 1, "world_size", "be at least 1", world_size)
    rounds = -(-micro_batches // world_size)
    plans = [_shared(plan, rounds * world_size) for plan in plans]
    parts = [_work(plan, lengths, seconds, cost, shape) for plan in plans]
    work = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    # A rank runs its micro-batches one after the other and waits at the end of the step.
    uneven = imbalance(work["flops_run"], rounds * world_size, world_size)
    audio = float(work["seconds"].sum())
    total = float(work["flops_run"].sum(dtype=np.float64))
    steps = len(uneven)
    return PlanReport(
        steps=steps,
        planned=int(work["utterances"].sum()),
        deferred=len(plans[-1].deferred),
        batch_utterances=float(work["utterances"].mean()),
        batch_audio_seconds=float(work["seconds"].mean()),
        **{
            f"padding_{name}": _unused(work[name], work[f"{name}_run"])
            for name in ("frames", "tokens", "flops", "cells")
        },
        rank_imbalance_mean=float(uneven.mean()),
        rank_imbalance_p99=float(np.quantile(uneven, 0.99)),
        bucket_mismatch=_mismatch(plans, buckets, world_size),
        step_flops=total / steps,
        flops_per_audio_hour=3600 * total / audio if audio else 0.0,
    )


def _shared(plan: EpochPlan, micro_batches: int) -> EpochPlan:
    """Append empty micro-batches to each step, up to this number."""
    extra = micro_batches - plan.micro_batches
    if not extra:
        return plan
    starts = plan.offsets[:-1].reshape(-1, plan.micro_batches)
    ends = np.repeat(plan.offsets[plan.micro_batches :: plan.micro_batches, None], extra, axis=1)
    offsets = np.append(np.concatenate([starts, ends], axis=1), plan.offsets[-1])
    return replace(plan, micro_batches=micro_batches, offsets=offsets)


def _work(
    plan: EpochPlan,
    lengths: UtteranceLengths,
    seconds: np.ndarray,
    cost: CostModel,
    shape: StaticShape | None,
) -> dict[str, np.ndarray]:
    """Sum each micro-batch: what utterances need, and as ``*_run`` what is executed."""
    frames = lengths.frames[plan.indices].astype(np.int64)
    tokens = lengths.tokens[plan.indices].astype(np.int64)
    count = np.diff(plan.offsets)
    sums = [
        _reduce(np.add, values, plan.offsets)
        for values in (frames, tokens, frames * tokens, cost.of(frames, tokens))
    ]
    all_frames, all_tokens, cells, flops = sums
    if shape is None:
        widest = _reduce(np.maximum, frames, plan.offsets)
        longest = _reduce(np.maximum, tokens, plan.offsets)
        frame_rows, token_rows = count * widest, count * longest
        cells_run, flops_run = frame_rows * longest, count * cost.of(widest, longest)
    else:
        frame_rows = np.full(len(count), shape.frame_budget)
        token_rows = np.full(len(count), shape.token_budget)
        tail_frames, tail_tokens = frame_rows - all_frames, token_rows - all_tokens
        cells_run = cells
        flops_run = flops + cost.frame * tail_frames + cost.token * tail_tokens
    return {
        "utterances": count,
        "seconds": _reduce(np.add, seconds[plan.indices], plan.offsets),
        "frames": all_frames,
        "tokens": all_tokens,
        "cells": cells,
        "flops": flops,
        "frames_run": frame_rows,
        "tokens_run": token_rows,
        "cells_run": cells_run,
        "flops_run": flops_run,
    }


def _reduce(function: np.ufunc, values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Reduce each micro-batch; 0 where it is empty, a case that ``ufunc.reduceat`` gets wrong."""
    reduced = np.zeros(len(offsets) - 1, dtype=values.dtype)
    filled = np.flatnonzero(np.diff(offsets))
    if filled.size:
        reduced[filled] = function.reduceat(values, offsets[filled])
    return reduced


def _mismatch(
    plans: Sequence[EpochPlan], buckets: np.ndarray | None, world_size: int
) -> float | None:
    """Return the share of the steps in which ranks run different buckets at the same time."""
    if buckets is None:
        return None
    differ = []
    for plan in plans:
        drawn = np.full(len(plan.offsets) - 1, -1, dtype=np.int64)
        filled = np.flatnonzero(np.diff(plan.offsets))
        drawn[filled] = buckets[plan.indices[plan.offsets[filled]]]
        together = drawn.reshape(plan.num_steps, -1, world_size)
        largest = together.max(axis=2, keepdims=True)
        # An empty micro-batch differs from no other.
        differ.append(((together != largest) & (together >= 0)).any(axis=(1, 2)))
    return float(np.concatenate(differ).mean())


def _unused(used: np.ndarray, executed: np.ndarray) -> float:
    # In floats, because the FLOPs of a large corpus exceed int64.
    total = float(executed.sum(dtype=np.float64))
    return 1 - float(used.sum(dtype=np.float64)) / total if total else 0.0
