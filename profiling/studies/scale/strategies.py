"""Strategies by name, and what is predicted of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scale import lockstep
from scale.cluster import Cluster
from scale.gossip import Gossip, GossipCosts
from scale.workload import Stragglers, Workload, draw

LOCKSTEP = ("ddp", "fsdp2", "local_sgd", "hierarchical", "delayed")
GOSSIP = ("adpsgd", "h_adpsgd")
_MOST_STEPS = 20_000


@dataclass(frozen=True, slots=True)
class Strategy:
    """A value of ``training.strategy`` with its settings.

    Attributes:
        text: Text of the argument.
        name: Name without settings.
        periods: GPUs of a group (None for all) by the steps between two averages of their weights,
            for local_sgd and hierarchical.
        learner_size: GPUs of a learner of h_adpsgd; None for those of a node.
    """

    text: str
    name: str
    periods: dict[int, int | None]
    learner_size: int | None

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read ``ddp``, ``local_sgd:8``, ``hierarchical:2x8,16``, ``h_adpsgd:8``.

        Raises:
            ValueError: It is none of these.
        """
        name, _, rest = text.partition(":")
        if name not in (*LOCKSTEP, *GOSSIP):
            raise ValueError(
                f"`strategies` must be of {', '.join((*LOCKSTEP, *GOSSIP))}, but one is {text!r}."
            )
        periods: dict[int, int | None] = {}
        learner_size = 1 if name == "adpsgd" else None
        try:
            if name == "local_sgd":
                periods = {_count(rest or "8"): None}
            elif name == "hierarchical":
                for part in (rest or "2x8,16").split(","):
                    period, _, size = part.partition("x")
                    periods[_count(period)] = _count(size) if size else None
                if periods[max(periods)] is not None:
                    raise ValueError
            elif name == "h_adpsgd" and rest:
                learner_size = _count(rest)
            elif rest:
                raise ValueError
        except ValueError:
            raise ValueError(
                "`strategies` must be written like ddp, local_sgd:8 (steps), h_adpsgd:8 (GPUs of a "
                "learner) or hierarchical:2x8,16 (every 2 steps groups of 8, every 16 all), but "
                f"one is {text!r}."
            ) from None
        return cls(text, name, periods, learner_size)

    @property
    def waits(self) -> bool:
        """Whether ranks go in step with each other."""
        return self.name in LOCKSTEP


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted performance of a strategy on a cluster.

    Attributes:
        strategy: Text of the strategy.
        gpus: Number of GPUs of the cluster.
        samples_per_s: Samples per second of all learners together.
        efficiency: This rate divided by that of as many GPUs that neither wait nor communicate, and
            of which none is slow.
        step_s: Mean time from one update of a learner to the next.
        slowest_share: Samples of the learner that has fewest, divided by the mean of the learners.
        updates_per_exchange: Updates of a learner from one gossip exchange to the next; None
            without gossip.
        staleness: Updates of a learner during a gossip exchange.
    """

    strategy: str
    gpus: int
    samples_per_s: float
    efficiency: float
    step_s: float
    slowest_share: float
    updates_per_exchange: float | None = None
    staleness: float | None = None


def predict(
    strategy: Strategy,
    cluster: Cluster,
    workload: Workload,
    stragglers: Stragglers,
    costs: GossipCosts,
    *,
    steps: int = 400,
    seed: int = 0,
) -> Prediction:
    """Let a strategy train for some steps.

    Args:
        strategy: Strategy to predict.
        cluster: GPUs and links.
        workload: Workload of each GPU.
        stragglers: Sources of slowness.
        costs: Costs of gossip.
        steps: Steps of a GPU that nothing slows; the slowest makes at least 20.
        seed: Random seed; equal seeds give equal results.

    Raises:
        ValueError: Groups do not divide the GPUs, or a node is slower than can be counted.
    """
    ideal = cluster.gpus * workload.samples / (workload.step_s + workload.overhead_s)
    if strategy.waits:
        seconds = _in_step(strategy, cluster, workload, stragglers, steps, seed)
        step_s = float(seconds.mean())
        rate = cluster.gpus * workload.samples / step_s
        return Prediction(strategy.text, cluster.gpus, rate, rate / ideal, step_s, 1.0)
    steps = max(steps, math.ceil(20 * stragglers.most))
    if steps > _MOST_STEPS:
        raise ValueError(
            f"`slow_nodes` must be factors of at most {_MOST_STEPS // 20}, but one is "
            f"{stragglers.most:g}: leave out a node that does nothing."
        )
    size = strategy.learner_size or min(cluster.gpus_per_node, cluster.gpus)
    run = Gossip(cluster, workload, stragglers, costs, size, seed)
    until = steps * (workload.step_s + workload.overhead_s)
    run.run(until)
    # Of a GPU each, between ends of steps, so that no part of one counts.
    per_gpu = np.array([_updates(learner.ends, until) for learner in run.learners])
    per_gpu *= workload.samples
    rate = float(per_gpu @ [learner.gpus for learner in run.learners])
    mean = float(per_gpu.mean())
    # Before its first exchange a learner has nothing to count from.
    lags = [lag for learner in run.learners for lag in learner.lags[1:]]
    stale = [updates for learner in run.learners for updates in learner.stale]
    return Prediction(
        strategy.text,
        cluster.gpus,
        rate,
        rate / ideal,
        workload.samples / mean,
        float(per_gpu.min()) / mean,
        float(np.mean(lags)) if lags else None,
        float(np.mean(stale)) if stale else None,
    )


def _updates(ends: list[float], until: float) -> float:
    """Return the updates per second."""
    return (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 else len(ends) / until


def _in_step(
    strategy: Strategy,
    cluster: Cluster,
    workload: Workload,
    stragglers: Stragglers,
    steps: int,
    seed: int,
) -> np.ndarray:
    """Return seconds of each step."""
    nodes = [cluster.node_of(gpu) for gpu in range(cluster.gpus)]
    random = np.random.default_rng(seed)
    slowest = draw(workload, stragglers, nodes, steps, random).max(axis=1)
    if strategy.name == "ddp":
        return lockstep.ddp(cluster, workload, slowest)
    if strategy.name == "fsdp2":
        return lockstep.fsdp2(cluster, workload, slowest)
    if strategy.name == "delayed":
        return lockstep.delayed(cluster, workload, slowest)
    for size in strategy.periods.values():
        if size is not None and size < cluster.gpus and cluster.gpus % size:
            raise ValueError(
                f"`strategies`: {strategy.text} must have groups that divide the {cluster.gpus} "
                f"GPUs, but one is of {size}."
            )
    # Whole periods, or the mean would depend on where they are cut off.
    whole = steps - steps % math.lcm(*strategy.periods) or steps
    return lockstep.averaging(cluster, workload, slowest[:whole], strategy.periods)
