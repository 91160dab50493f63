"""The packed planner: micro-batches that fill a frame budget and a token budget at once.

Each micro-batch gets a contiguous part of a random order. Then micro-batches exchange single
utterances until frames and tokens fit in all of them and their predicted costs are about equal.
Micro-batches of similar cost share a step.
"""

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from effasr.checks import check
from effasr.data.batch import StaticShape
from effasr.data.sampling.cost import CANARY_180M_FLASH, CostModel
from effasr.data.sampling.ends import Ends, capacity
from effasr.data.sampling.filling import Filled, Utterances, budgets, fill
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths, shuffled

_ATTEMPTS = 8
"""Orders that are tried before a step is added, if micro-batches are few."""
_SMALL = 512
"""Most micro-batches filled by these attempts, over all of them."""
_SAMPLED = 48
"""Micro-batches that are filled to see how many utterances they have."""
_MANY = 1024
"""Utterances of a micro-batch from which the fullest one has hardly more than the mean."""

EpochEnd = Literal["carry", "exact"]


def plan_epoch(
    lengths: UtteranceLengths,
    *,
    shape: StaticShape,  # budgets of a micro-batch
    micro_batches: int,  # of a global step, over all ranks
    seed: int,
    epoch: int,
    cost: CostModel = CANARY_180M_FLASH,  # by which micro-batches are steps
    epoch_end: EpochEnd | None = None,  # by default ``carry``, or ``exact`` for a ``population``
    # int32 (p,), the utterances of this epoch with repetitions, instead of every utterance once.
    # Only ``exact`` is possible, because other epochs may have others.
    population: np.ndarray | None = None,
) -> EpochPlan:
    """Plan an epoch; a pure function of its arguments.

    With ``carry`` every epoch has full steps only: the surplus utterances, a random subset of known
    size, are carried over to the next epoch, which plans them with its own. After epoch e, each
    utterance was planned e + 1 times, or e times if it is in ``deferred``. With ``exact`` an epoch
    is exactly the corpus, and the room left in its last step is spread evenly over all steps. A
    corpus that fills less than a step is always planned so.
    """
    _check(micro_batches, epoch, epoch_end, population)
    members = _members(lengths, population)
    everything = _taken(lengths, members, None, shape)
    _check_fits(everything.frames, members, shape.frame_budget, "frame_budget", "frames")
    _check_fits(everything.tokens, members, shape.token_budget, "token_budget", "tokens")
    if shape.node_budget is not None:
        nodes = nodes_of(everything.frames, everything.tokens)
        _check_fits(nodes, members, shape.node_budget, "node_budget", "nodes")
    ends = Ends(everything, capacity(everything, shape), micro_batches, seed)
    deferred = members[:0]
    usual = 0
    if epoch_end == "exact" or population is not None or not ends.fills_a_step:
        # These utterances may fill their budgets better than a sample of them did.
        usual = ends.least_steps
        num_steps = min(usual, _fewest_steps(everything, shape, micro_batches))
    else:
        num_steps = ends.num_steps(epoch)
        remaining = ends.carried(epoch)
        deferred = members[remaining]
        members = np.concatenate([np.delete(members, remaining), members[ends.carried(epoch - 1)]])
    del everything, ends
    while True:
        for attempt in range(max(1, min(_ATTEMPTS, _SMALL // (num_steps * micro_batches)))):
            order = members[shuffled(len(members), seed + attempt, epoch)]
            utterances = _taken(lengths, order, cost, shape)
            filled = _filled(utterances, shape, num_steps * micro_batches)
            if filled is not None:
                return _plan(filled, utterances, order, deferred, shape, micro_batches, seed, epoch)
        # Rarely needed: all micro-batches become a little emptier.
        num_steps = max(usual, num_steps + max(1, num_steps // 256))


def suggest_token_budget(
    lengths: UtteranceLengths, frame_budget: int, sums: tuple[int, int] | None = None
) -> int:
    """Return the token budget that this corpus fills along with the frame budget.

    It is raised if more than one utterance in a thousand would exceed it.
    """
    totals = (int(x.sum(dtype=np.int64)) for x in (lengths.frames, lengths.tokens))
    frames, tokens = totals if sums is None else sums
    if frames < 1:
        raise ValueError("`lengths` must hold at least one frame, but holds none.")
    rank = len(lengths) - 1 - len(lengths) // 1000
    return max(
        -(-frame_budget * tokens // frames), int(np.partition(lengths.tokens, rank)[rank]), 1
    )


def suggest_node_budget(
    usual: UtteranceLengths, frame_budget: int, everything: UtteranceLengths
) -> int:
    """Return a node budget that micro-batches of this corpus rarely fill, and no utterance exceeds.

    It is a sixteenth more than the utterances of the frame budget need on average. Kernels multiply
    rows for the whole budget.
    """
    frames = int(usual.frames.sum(dtype=np.int64))
    if frames < 1:
        raise ValueError("`usual` must hold at least one frame, but holds none.")
    nodes = int(nodes_of(usual.frames, usual.tokens).sum())
    most = int(nodes_of(everything.frames, everything.tokens).max(initial=1))
    # A budget that is no limit, to read a corpus, stays within what kernels can count.
    return min(max(-(-frame_budget * nodes * 17 // (frames * 16)), most), 2**31 - 1)


def with_sequences(
    shape: StaticShape, requested: int | Literal["auto"] | None, usual: UtteranceLengths
) -> StaticShape:
    """Return the shape with ``DataConfig.max_sequences`` utterances; its own number is for None.

    ``auto`` is a quarter more than the fullest of some micro-batches of ``usual``, an epoch, has,
    in multiples of 8: kernels have programs for every sequence, also for empty ones, and the audio
    has a frame for each. Every plan keeps to it, so that an epoch with more short utterances has
    emptier micro-batches.
    """
    if isinstance(requested, int):
        return replace(shape, max_sequences=requested)
    fits = (usual.frames <= shape.frame_budget) & (usual.tokens <= shape.token_budget)
    frames, tokens = usual.frames[fits], usual.tokens[fits]
    filled = max(int(frames.sum()) / shape.frame_budget, int(tokens.sum()) / shape.token_budget)
    if requested is None or not filled:
        return shape
    fullest = math.ceil(len(frames) / filled)
    if fullest < _MANY:
        # Those of a small corpus are repeated, so that all micro-batches are full.
        count = math.ceil(_SAMPLED * len(frames) / filled)
        chosen = (np.arange(count) * len(frames) // count)[shuffled(count, 0, 0)]
        some = Utterances(frames[chosen], tokens[chosen])
        free, batches = replace(shape, node_budget=None), _SAMPLED
        while (made := fill(some, free, batches)) is None:
            batches += 1 + batches // 50
        fullest = int(np.diff(made.starts).max())
    return replace(shape, max_sequences=min(shape.max_sequences, -(-5 * fullest // 32) * 8))


def nodes_of(frames: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return what each utterance takes of a node budget: int64 (n,); see `StaticShape`."""
    return frames.astype(np.int64) * tokens


def _check(
    micro_batches: int, epoch: int, epoch_end: str | None, population: np.ndarray | None
) -> None:
    check(micro_batches >= 1, "micro_batches", "be at least 1", micro_batches)
    check(epoch >= 0, "epoch", "be at least 0", epoch)
    if epoch_end not in (None, "carry", "exact"):
        raise ValueError(f"`epoch_end` must be 'carry' or 'exact', but is {epoch_end!r}.")
    rule = "be 'exact' for a `population`"
    remedy = "what one epoch leaves may not be part of the next"
    check(population is None or epoch_end != "carry", "epoch_end", rule, "'carry'", remedy)


def _members(lengths: UtteranceLengths, population: np.ndarray | None) -> np.ndarray:
    """Return the utterances of an epoch, int32."""
    check(len(lengths), "lengths", "hold at least one utterance", "empty")
    if population is None:
        return np.arange(len(lengths), dtype=np.int32)
    if population.ndim != 1 or population.dtype != np.int32:
        raise ValueError(
            f"`population` must be int32 (p,), but is {population.dtype} {population.shape}."
        )
    check(len(population), "population", "hold at least one utterance", "empty")
    least, most = int(population.min()), int(population.max())
    if least < 0 or most >= len(lengths):
        raise ValueError(
            f"`population` must be of indices in 0 .. {len(lengths) - 1}, but has "
            f"{least if least < 0 else most}."
        )
    return population


def _check_fits(values: np.ndarray, members: np.ndarray, budget: int, name: str, what: str) -> None:
    over = np.flatnonzero(values > budget)
    if over.size:
        shown = ", ".join(f"{members[place]} ({values[place]})" for place in over[:5])
        raise ValueError(
            f"plan_epoch: every utterance must fit in `{name}` = {budget}, but {over.size} have "
            f"more {what}: {shown}{', ...' if over.size > 5 else ''}: drop them or raise the "
            "budget."
        )


def _taken(
    lengths: UtteranceLengths, members: np.ndarray, cost: CostModel | None, shape: StaticShape
) -> Utterances:
    frames, tokens = lengths.frames[members], lengths.tokens[members]
    nodes = None
    if shape.node_budget is not None:
        # More than fit in int32 are more than any budget.
        nodes = np.minimum(nodes_of(frames, tokens), 2**31 - 1).astype(np.int32)
    return Utterances(frames, tokens, None if cost is None else cost.of(frames, tokens), nodes)


def _fewest_steps(utterances: Utterances, shape: StaticShape, micro_batches: int) -> int:
    """Return the steps that the utterances would need if they could fill every budget."""
    limits = (limit * micro_batches for limit in budgets(shape))
    totals = utterances.totals()
    return max(1, *(-(-total // limit) for total, limit in zip(totals, limits, strict=True)))


def _filled(utterances: Utterances, shape: StaticShape, micro_batches: int) -> Filled | None:
    for reserve in (False, True):
        if filled := fill(utterances, shape, micro_batches, reserve=reserve):
            return filled
    return None


def _plan(
    filled: Filled,
    utterances: Utterances,
    order: np.ndarray,
    deferred: np.ndarray,
    shape: StaticShape,
    micro_batches: int,
    seed: int,
    epoch: int,
) -> EpochPlan:
    """Group the micro-batches into steps."""
    assert utterances.cost is not None
    starts = filled.starts
    # Sum the values of each micro-batch: int64.
    ends = np.concatenate([[0], np.cumsum(utterances.cost[filled.members])])
    cost = ends[filled.starts[1:]] - ends[filled.starts[:-1]]
    chosen = group_into_steps(cost, micro_batches, seed, epoch).ravel()
    sizes = np.diff(starts)[chosen]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    # Indices into the members, micro-batch by micro-batch in the new order.
    places = np.arange(len(filled.members)) + np.repeat(starts[chosen] - offsets[:-1], sizes)
    frames, tokens, *_ = utterances.totals()
    return EpochPlan(
        micro_batches=micro_batches,
        indices=order[filled.members[places]],
        offsets=offsets,
        deferred=deferred,
        padding_frames=1 - frames / (len(chosen) * shape.frame_budget),
        padding_tokens=1 - tokens / (len(chosen) * shape.token_budget),
    )


# Groups micro-batches into global steps so that ranks have equal work.

_ORDERS = 24
"""Orders of a step's micro-batches that are tried; the most balanced one is used."""


def group_into_steps(cost: np.ndarray, micro_batches: int, seed: int, epoch: int) -> np.ndarray:
    """Group micro-batches of similar cost into steps, in random order: (steps, micro_batches).

    ``cost`` is the predicted FLOPs of each micro-batch, int64. Within a step, rank r of W runs the
    micro-batches r, r + W, ...: their order balances the ranks for all W that divide
    ``micro_batches``.
    """
    alike = np.argsort(cost, kind="stable").reshape(-1, micro_batches)
    alike = alike[shuffled(len(alike), seed, epoch)]
    # Orders to try for micro-batches sorted by cost; the first balances equal halves.
    half = (micro_batches + 1) // 2
    fold = np.concatenate([np.arange(half), np.arange(micro_batches - 1, half - 1, -1)])
    random = [shuffled(micro_batches, micro_batches, number) for number in range(_ORDERS - 1)]
    orders = np.stack([fold, *random])
    worlds = [w for w in range(2, micro_batches) if micro_batches % w == 0]
    if not worlds:
        return alike
    best = np.zeros(len(alike), np.int64)
    least = np.full(len(alike), np.iinfo(np.int64).max)
    sorted_cost = cost[alike]
    for number, order in enumerate(orders):
        worst = np.zeros(len(alike), np.int64)
        for world in worlds:
            ranks = sorted_cost[:, order].reshape(len(alike), -1, world).sum(axis=1)
            # The mean over ranks is total / world: multiples of it are compared, to stay in
            # integers.
            np.maximum(worst, ranks.max(axis=1) * world, out=worst)
        best[worst < least] = number
        np.minimum(least, worst, out=least)
    return np.take_along_axis(alike, orders[best], axis=1)


def imbalance(cost: np.ndarray, micro_batches: int, world_size: int) -> np.ndarray:
    """Return by how much the slowest rank's work exceeds the mean of the ranks, in each step.

    ``cost`` is the predicted FLOPs of each micro-batch, as planned. The result is relative to the
    mean, float64 (steps,).
    """
    rule = f"divide `micro_batches` = {micro_batches}"
    check(world_size >= 1 and (not micro_batches % world_size), "world_size", rule, world_size)
    ranks = cost.reshape(-1, micro_batches // world_size, world_size).sum(axis=1)
    mean = ranks.mean(axis=1)
    return np.divide(ranks.max(axis=1), mean, out=np.ones(len(mean)), where=mean > 0) - 1
