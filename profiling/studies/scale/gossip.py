"""Learners that wait for nobody: discrete events of AD-PSGD on a ring.

Each learner is a group of neighbouring GPUs that work as with ddp. It claims a share of work, makes
an update, and claims the next. Threads of its own exchange weights by the CPU, as those of
`effasr.distributed.async_sgd.gossip`: a learner at an even place begins an exchange with its
neighbours in turn, as soon as it has published its weights since the last one began; those at odd
places answer each neighbour at once. Computing never waits for that, but it adds what has arrived
to the weights, and that takes its time (Lian et al. 2018, "Asynchronous decentralized parallel
stochastic gradient descent"; Zhang et al. 2019, arXiv 1907.05701).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from scale.cluster import Cluster, Link
from scale.lockstep import ddp
from scale.workload import Stragglers, Workload, draw

_BLOCK = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class GossipCosts:
    """Costs of gossip on a cluster.

    Attributes:
        link: Link between two nodes through the CPU; None for the cluster's link.
        staging: Link between GPU and CPU, used by outgoing and incoming weights.
        host_bytes_per_s: Rate at which a CPU averages two rows of weights.
        period: Updates from one publication of the weights to the next.
        claim_s: Seconds for which the store is busy with each share of work that it hands out.
    """

    link: Link | None = None
    staging: Link = field(default_factory=lambda: Link(1e-5, 20e9))
    host_bytes_per_s: float = 5e9
    period: int = 1
    claim_s: float = 5e-5

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"`period` must be at least 1, but is {self.period}.")
        if self.claim_s < 0:
            raise ValueError(f"`claim_s` must be at least 0, but is {self.claim_s}.")


@dataclass(slots=True)
class Learner:
    """A group of GPUs with weights of its own.

    Attributes:
        gpus: Number of GPUs.
        node: Node of the first of them.
        neighbours: Positions in the ring of the learners that it exchanges weights with.
        steps: Durations of its steps in seconds, in order.
        ends: Times at which its steps ended.
        since: Updates since its last exchange began.
        lags: Value of ``since`` at the beginning of each exchange.
        stale: Number of updates made during each exchange.
        arrived: Whether there is something to add to the weights.
        published: Whether weights were published since its last exchange began.
        exchanging: Whether an exchange that it began is in progress.
        turns: Number of exchanges that it began.
    """

    gpus: int
    node: int
    neighbours: list[int]
    steps: Iterator[float]
    ends: list[float] = field(default_factory=list)
    since: int = 0
    lags: list[int] = field(default_factory=list)
    stale: list[int] = field(default_factory=list)
    arrived: bool = False
    published: bool = False
    exchanging: bool = False
    turns: int = 0


class Gossip:
    """A run of learners, until a given time.

    Args:
        cluster: The GPUs.
        workload: Workload of each GPU.
        stragglers: Sources of slowness.
        costs: Costs of gossip.
        learner_size: GPUs of a learner; the last one may have fewer.
        seed: Seed of jitter and pauses.
    """

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        stragglers: Stragglers,
        costs: GossipCosts,
        learner_size: int,
        seed: int,
    ) -> None:
        if learner_size < 1:
            raise ValueError(f"`learner_size` must be at least 1, but is {learner_size}.")
        self._cluster = cluster
        self._workload = workload
        self._stragglers = stragglers
        self._costs = costs
        self._size = workload.parameters * workload.weight_bytes
        count = -(-cluster.gpus // learner_size)
        self.learners: list[Learner] = []
        for place in range(count):
            first = place * learner_size
            gpus = range(first, min(first + learner_size, cluster.gpus))
            steps = self._steps(list(gpus), np.random.default_rng([seed, place]))
            node = cluster.node_of(first)
            self.learners.append(Learner(len(gpus), node, neighbours(place, count), steps))
        self._crossing = [0] * cluster.nodes
        self._store_free = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, int, int]] = []

    def run(self, until: float) -> None:
        """Let the clock go on until so many seconds."""
        for place in range(len(self.learners)):
            self._begin(0.0, place)
        while self._events and self._events[0][0] <= until:
            now, _, place, other = heapq.heappop(self._events)
            if other < 0:
                self._updated(now, place)
            else:
                self._exchanged(now, place, other)

    def _at(self, when: float, place: int, other: int = -1) -> None:
        """Note the end of a step of a learner, or of an exchange that it began with another."""
        heapq.heappush(self._events, (when, next(self._numbers), place, other))

    def _begin(self, now: float, place: int) -> None:
        """Claim a share from the store, which serves one learner after the other, and work."""
        learner = self.learners[place]
        if len(self.learners) > 1:
            self._store_free = max(now, self._store_free) + self._costs.claim_s
            # There and back.
            now = self._store_free + 2 * self._cluster.inter.latency_s
        if learner.arrived:
            learner.arrived = False
            # To the first GPU of the learner, which hands it on.
            now += self._costs.staging.seconds(self._size)
            now += self._cluster.intra.seconds(self._size) if learner.gpus > 1 else 0.0
        self._at(now + next(learner.steps), place)

    def _updated(self, now: float, place: int) -> None:
        learner = self.learners[place]
        learner.ends.append(now)
        learner.since += 1
        if len(learner.ends) % self._costs.period == 0:
            learner.published = True
        self._begin(now, place)
        self._exchange(now, place)

    def _exchange(self, now: float, place: int) -> None:
        """Begin an exchange, if it is this learner's part, and there is something new."""
        learner = self.learners[place]
        if place % 2 or learner.exchanging or not learner.published or not learner.neighbours:
            return
        other = learner.neighbours[learner.turns % len(learner.neighbours)]
        learner.turns += 1
        learner.exchanging, learner.published = True, False
        for one in (learner, self.learners[other]):
            one.lags.append(one.since)
            one.since = 0
        self._cross(place, other, 1)
        self._at(now + self._seconds(place, other), place, other)

    def _exchanged(self, now: float, place: int, other: int) -> None:
        self._cross(place, other, -1)
        for one in (self.learners[place], self.learners[other]):
            one.stale.append(one.since)
            one.arrived = True
        self.learners[place].exchanging = False
        self._exchange(now, place)

    def _cross(self, place: int, other: int, change: int) -> None:
        """Count the exchanges that pass through the network of a node."""
        ends = {self.learners[place].node, self.learners[other].node}
        if len(ends) > 1:
            for node in ends:
                self._crossing[node] += change

    def _seconds(self, place: int, other: int) -> float:
        """Return the time of an exchange: GPU to host, to the other learner, and its weights back.

        It has an equal share, to its end, of the networks that it uses, as divided at its
        beginning.
        """
        ends = [self.learners[place].node, self.learners[other].node]
        at_ends = self._costs.staging.seconds(self._size)
        at_ends += 2 * self._size / self._costs.host_bytes_per_s
        if ends[0] == ends[1]:
            # By memory: one more copy each way.
            return at_ends + 2 * self._size / self._costs.host_bytes_per_s
        link = self._costs.link or self._cluster.inter
        slower = max(self._stragglers.slow_link if node == 0 else 1.0 for node in ends)
        share = max(self._crossing[node] for node in ends)
        return at_ends + 2 * link.slower(slower * share).seconds(self._size)

    def _steps(self, gpus: list[int], random: np.random.Generator) -> Iterator[float]:
        """Yield seconds of the steps of a learner, whose GPUs exchange gradients."""
        cluster = self._cluster
        nodes = [cluster.node_of(gpu) for gpu in gpus]
        inner = Cluster(
            len(gpus),
            cluster.gpus_per_node,
            cluster.intra,
            cluster.inter,
            cluster.algorithm,
            self._stragglers.slow_link if len(set(nodes)) > 1 and 0 in nodes else 1.0,
        )
        while True:
            drawn = draw(self._workload, self._stragglers, nodes, _BLOCK, random)
            yield from ddp(inner, self._workload, drawn.max(axis=1)).tolist()


def neighbours(place: int, count: int) -> list[int]:
    """On a ring, those of the other colour: of an odd ring the ends are none of each other's."""
    around = {(place - 1) % count, (place + 1) % count} - {place}
    return sorted(other for other in around if (other - place) % 2)
