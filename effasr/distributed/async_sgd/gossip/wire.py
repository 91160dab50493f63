"""What two learners tell each other.

The active one sends a header, int64 (2,): what follows, and how many numbers. After EXCHANGE it
sends its weights and receives those of the passive one, as they were before these were averaged.
After STOP it sends nothing until both have begun anew. ALIVE stands for itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXCHANGE, ALIVE, STOP = 1, 2, 3


def header(kind: int, count: int) -> Tensor:
    """A header to be sent."""
    return torch.tensor([kind, count])


def blank() -> Tensor:
    """A header to be received into."""
    return torch.zeros(2, dtype=torch.int64)


def read(message: Tensor, count: int, *, learner: int, peer: int) -> int:
    """The kind of a header that was received.

    Args:
        message: The header.
        count: Numbers that this learner averages.
        learner: This one.
        peer: Who sent it.

    Raises:
        ValueError: The two learners cannot be averaged.
    """
    kind, theirs = message.tolist()
    if kind not in (EXCHANGE, ALIVE, STOP):
        raise ValueError(f"a message of unknown kind {kind}: something else uses the group.")
    if theirs != count:
        raise ValueError(
            f"learner {learner} averages {count} numbers, but learner {peer} {theirs}: start all "
            "learners with the same model."
        )
    return kind
