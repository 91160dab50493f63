"""Schedule and topology of averaging between learners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from effasr.checks import check
from effasr.distributed.async_sgd.gossip.tls import TLSConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class GossipConfig:
    """Background averaging of weights between pairs of learners.

    Attributes:
        topology: Pairs of learners that average. ``ring``: each learner alternates between its two
            neighbours; an even number of learners is better. ``random``: an even-numbered learner
            averages with an odd-numbered one, drawn anew each time; this mixes many learners faster
            than a ring and stays connected when several are lost.
        learner_size: Processes per learner, which exchange gradients in every step; null: those of
            a node. With ``adpsgd``, always 1.
        period: Updates between two copies of its weights that a learner publishes. A larger period
            reduces traffic between GPU and host and between nodes.
        timeout_s: Longest silence of a learner in an exchange, in seconds, before it is left out of
            the run. A process that ends is detected at once; slow computation does not count as
            silence.
        tls: Certificates for encrypting connections between learners; null: learners authenticate
            each other as members of this run, but data are not encrypted.
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
        check(self.period >= 1, "period", "be at least 1", self.period)
        check(self.timeout_s > 0, "timeout_s", "be positive", self.timeout_s)
