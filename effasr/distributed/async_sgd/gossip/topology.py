"""Pairs of learners that average with each other.

Even-numbered learners are active: they begin exchanges. Odd-numbered ones are passive: they answer.
Every edge joins an active and a passive learner, so learners cannot deadlock. A ring of odd size
lacks the edge between its last and its first learner, which are both active: it is a path, and a
long path mixes about four times as slowly.

An exchange multiplies the expected squared distance of n learners from their mean by at most 1 - (1
- cos(2 pi / n)) / n in a ring of even size, 1 - (1 - cos(pi / n)) / (n - 1) in one of odd size, and
1 - 1 / n (n odd: 1 - 1 / (n + 1)) with ``random``. As about n / 2 exchanges take place per update,
``random`` mixes many learners as fast as few.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from effasr.checks import check

Topology = Literal["ring", "random"]


def is_active(learner: int) -> bool:
    """Return whether a learner begins exchanges rather than answering them."""
    return learner % 2 == 0


def neighbours(topology: Topology, learner: int, learners: int) -> tuple[int, ...]:
    """Return the learners that ``learner`` may average with, in ascending order."""
    if learners < 2:
        raise ValueError(
            f"`learners` must be at least 2, but is {learners}: a single learner has nobody to "
            "average with; start more processes, make learners smaller, or use strategy ddp."
        )
    check(0 <= learner < learners, "learner", f"be from 0 to {learners - 1}", learner)
    if topology == "random":
        return tuple(range(1 if is_active(learner) else 0, learners, 2))
    beside = {(learner - 1) % learners, (learner + 1) % learners}
    return tuple(sorted(n for n in beside if is_active(n) != is_active(learner)))


def choose(topology: Topology, seed: int, learner: int, living: Sequence[int], count: int) -> int:
    """Return the neighbour that an active learner averages with next."""
    if topology == "ring":
        return living[count % len(living)]
    return random.Random(f"{seed} {learner} {count}").choice(living)
