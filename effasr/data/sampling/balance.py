"""Groups micro-batches into global steps so that ranks have equal work."""

from __future__ import annotations

import numpy as np

from effasr.data.sampling.shuffle import shuffled

_ORDERS = 24
"""Orders of a step's micro-batches that are tried; the most balanced one is used."""


def steps(cost: np.ndarray, micro_batches: int, seed: int, epoch: int) -> np.ndarray:
    """Group micro-batches of similar cost into steps, in random order.

    Within a step, rank r of W runs the micro-batches r, r + W, ...: their order balances the ranks
    for all W that divide ``micro_batches``.

    Args:
        cost: int64 (steps * micro_batches,), predicted FLOPs of each micro-batch.
        micro_batches: Micro-batches of a step.
        seed: Seed of the run.
        epoch: Number of the epoch.

    Returns:
        int64 (steps, micro_batches), indices of micro-batches.
    """
    alike = np.argsort(cost, kind="stable").reshape(-1, micro_batches)
    alike = alike[shuffled(len(alike), seed, epoch)]
    orders = _orders(micro_batches)
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

    Args:
        cost: int (steps * micro_batches,), predicted FLOPs of each micro-batch, as planned.
        micro_batches: Micro-batches of a step.
        world_size: Number of ranks; divides ``micro_batches``.

    Returns:
        float64 (steps,), relative to the mean; 0 where all ranks have equal work.

    Raises:
        ValueError: ``world_size`` does not divide ``micro_batches``.
    """
    if world_size < 1 or micro_batches % world_size:
        raise ValueError(
            f"`world_size` must divide `micro_batches` = {micro_batches}, but is {world_size}."
        )
    ranks = cost.reshape(-1, micro_batches // world_size, world_size).sum(axis=1)
    mean = ranks.mean(axis=1)
    return np.divide(ranks.max(axis=1), mean, out=np.ones(len(mean)), where=mean > 0) - 1


def _orders(micro_batches: int) -> np.ndarray:
    """Return orders to try for micro-batches sorted by cost; the first balances equal halves."""
    half = (micro_batches + 1) // 2
    fold = np.concatenate([np.arange(half), np.arange(micro_batches - 1, half - 1, -1)])
    random = [shuffled(micro_batches, micro_batches, number) for number in range(_ORDERS - 1)]
    return np.stack([fold, *random])
