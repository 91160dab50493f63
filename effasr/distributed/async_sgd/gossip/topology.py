"""Who averages with whom.

Learners of even number are active: they begin exchanges. Those of odd number are passive: they
answer. Every edge joins an active and a passive one, so no circle of learners can wait for each
other. A ring of odd size has an edge between two active ones, the last and the first, and goes
without it: it is a path, whose ends have one neighbour, and which mixes about four times as slowly
where it is long. `contraction` has the figures.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal

Topology = Literal["ring", "random"]


def is_active(learner: int) -> bool:
    """Whether a learner begins exchanges, and does not answer them."""
    return learner % 2 == 0


def neighbours(topology: Topology, learner: int, learners: int) -> tuple[int, ...]:
    """The learners that one may average with, in ascending order.

    Args:
        topology: See `effasr.distributed.async_sgd.gossip.config.GossipConfig`.
        learner: From 0.
        learners: Their number.

    Raises:
        ValueError: There is nobody to average with, or no such learner.
    """
    if learners < 2:
        raise ValueError(
            f"`learners` must be at least 2, but is {learners}: a single learner has nobody to "
            "average with; start more processes, make learners smaller, or use strategy ddp."
        )
    if not 0 <= learner < learners:
        raise ValueError(f"`learner` must be from 0 to {learners - 1}, but is {learner}.")
    if topology == "random":
        return tuple(range(1 if is_active(learner) else 0, learners, 2))
    beside = {(learner - 1) % learners, (learner + 1) % learners}
    return tuple(sorted(n for n in beside if is_active(n) != is_active(learner)))


def contraction(topology: Topology, learners: int) -> float:
    """What one exchange multiplies the expected squared distance of learners from their mean by.

    An upper bound, if learners do nothing but average and all edges are equally likely. A pair that
    averages is a projection W, so the bound is the second largest eigenvalue of the mean of W over
    edges, which is ``I - Laplacian / (2 * edges)``. With n learners it is

        ring of even size           1 - (1 - cos(2 pi / n)) / n
        ring of odd size, a path    1 - (1 - cos(pi / n)) / (n - 1)
        random                      1 - 1 / n, or with n odd 1 - 1 / (n + 1)

    As about n / 2 exchanges take place per update, ``random`` brings many learners together as fast
    as few.

    Args:
        topology: See `effasr.distributed.async_sgd.gossip.config.GossipConfig`.
        learners: At least 2.
    """
    if learners == 2:
        return 0.0
    if topology == "random":
        return 1 - 1 / (learners + learners % 2)
    if learners % 2:
        return 1 - (1 - math.cos(math.pi / learners)) / (learners - 1)
    return 1 - (1 - math.cos(2 * math.pi / learners)) / learners


def choose(topology: Topology, seed: int, learner: int, living: Sequence[int], count: int) -> int:
    """With whom an active learner averages next.

    Args:
        topology: A ring takes its neighbours in turn, ``random`` any.
        seed: Of the run.
        learner: Who chooses.
        living: The neighbours that are left, at least one.
        count: Of its exchanges so far.
    """
    if topology == "ring":
        return living[count % len(living)]
    return random.Random(f"{seed} {learner} {count}").choice(living)
