"""Strategies whose ranks begin every step together, because they add up what the step counts.

effasr's step begins with the sum of its counts over all ranks, and ends with that of its losses,
whatever the strategy: the mean loss of a step is one over all ranks, and a request to stop reaches
all of them. So each step takes as long as its slowest GPU, also where weights are averaged seldom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from scale.cluster import Cluster
from scale.workload import BUCKET_BYTES, COUNTS_BYTES, Workload


def common(cluster: Cluster, workload: Workload) -> float:
    """Return seconds of a step that all strategies pay: two small sums, and what the host does."""
    return 2 * cluster.all_reduce(COUNTS_BYTES) + workload.overhead_s


def ddp(cluster: Cluster, workload: Workload, slowest: np.ndarray) -> np.ndarray:
    """Return seconds of steps whose gradients travel while the backward goes on.

    Buckets become ready at equal distances over the part of the backward that overlaps, on the
    slowest rank last, and travel one after the other: the last one, which is ready when the
    backward ends, never hides.

    Args:
        cluster: The GPUs.
        workload: Workload of each.
        slowest: float64 (steps,), of the GPU that computes longest.
    """
    size = workload.parameters * workload.gradient_bytes
    buckets = max(1, math.ceil(size / BUCKET_BYTES))
    one = cluster.all_reduce(size / buckets)
    hiding = workload.overlap * workload.backward * slowest * (1 - 1 / buckets)
    exposed = np.maximum(one, buckets * one - hiding)
    return slowest + exposed + common(cluster, workload)


def fsdp2(cluster: Cluster, workload: Workload, slowest: np.ndarray) -> np.ndarray:
    """Return seconds of steps that gather each layer while the one before computes.

    Forward and backward gather every layer, since it is given up after the forward, and the
    backward scatters the sums of its gradients, in float32.
    """
    layers = workload.layers
    gather = cluster.all_gather(workload.parameters / layers * workload.gathered_bytes)
    scatter = cluster.all_gather(workload.parameters / layers * 4.0)
    forward = (1 - workload.backward) * slowest / layers
    backward = workload.backward * slowest / layers
    seconds = gather + (layers - 1) * np.maximum(gather, forward) + forward
    seconds += gather + (layers - 1) * np.maximum(gather + scatter, backward) + backward + scatter
    return seconds + common(cluster, workload)


def averaging(
    cluster: Cluster, workload: Workload, slowest: np.ndarray, periods: Mapping[int, int | None]
) -> np.ndarray:
    """Return seconds of steps after which groups take the mean of their weights, now and then.

    Nothing hides it. Of groups that are due at once, the largest does it, as
    `effasr.distributed.local_sgd.LocalSGD`.

    Args:
        cluster: The GPUs.
        workload: Workload of each.
        slowest: float64 (steps,), of the GPU that computes longest.
        periods: GPUs of a group, None for all, by the steps between two means.
    """
    size = workload.parameters * workload.weight_bytes
    done = np.arange(1, len(slowest) + 1)
    extra = np.zeros(len(slowest))
    for period in sorted(periods):
        extra[done % period == 0] = cluster.all_reduce(size, periods[period])
    return slowest + extra + common(cluster, workload)


def delayed(cluster: Cluster, workload: Workload, slowest: np.ndarray) -> np.ndarray:
    """Return seconds of steps during which the mean of the weights before them is computed."""
    mean = cluster.all_reduce(workload.parameters * workload.weight_bytes)
    return np.maximum(slowest, mean) + common(cluster, workload)
