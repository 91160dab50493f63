"""Schedule and topology of averaging between learners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from effasr.distributed.async_sgd.gossip.tls import TLSConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class GossipConfig:
    """Averaging of weights in pairs of learners, in the background.

    Attributes:
        topology: Who averages with whom. ``ring``: each with the two beside it, in turn; an even
            number of learners is better. ``random``: one of even number with one of odd number,
            drawn anew each time; mixes many learners faster than a ring, and stays connected when
            several are lost.
        learner_size: Processes of a learner, which exchange gradients in every step; null: those of
            a node. With ``adpsgd``, always 1.
        period: Updates from one copy of its weights that a learner hands out to the next. More save
            traffic to and from the GPU and between nodes.
        timeout_s: How long a learner may stay silent in an exchange before it is left out of the
            run. One whose process ends is noticed at once; one that computes slowly is not silent.
        tls: Certificates with which connections between learners are encrypted; null: learners
            prove to each other that they are of this run, but data are not encrypted.
    """

    topology: Literal["ring", "random"] = "ring"
    learner_size: int | None = None
    period: int = 1
    timeout_s: float = 120.0
    tls: TLSConfig | None = None

    def __post_init__(self) -> None:
        if self.topology not in ("ring", "random"):
            raise ValueError(f"`topology` must be ring or random, but is {self.topology!r}.")
        if self.learner_size is not None and self.learner_size < 1:
            raise ValueError(
                f"`learner_size` must be at least 1 or null, but is {self.learner_size}."
            )
        if self.period < 1:
            raise ValueError(f"`period` must be at least 1, but is {self.period}.")
        if self.timeout_s <= 0:
            raise ValueError(f"`timeout_s` must be positive, but is {self.timeout_s}.")
