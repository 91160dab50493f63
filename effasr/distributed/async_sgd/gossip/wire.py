"""Messages between two learners.

The active learner sends a header, int64 (2,): a kind and the number of elements. After EXCHANGE it
sends its weights and receives the weights of the passive learner from before the averaging. After
STOP it sends nothing until both have started again. ALIVE has no further content.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXCHANGE, ALIVE, STOP = 1, 2, 3


def header(kind: int, count: int) -> Tensor:
    """Return a header to send."""
    return torch.tensor([kind, count])


def blank() -> Tensor:
    """Return a header to receive into."""
    return torch.zeros(2, dtype=torch.int64)


def read(message: Tensor, count: int, *, learner: int, peer: int) -> int:
    """Return the kind of a header received by ``learner`` from ``peer``."""
    kind, theirs = message.tolist()
    if kind not in (EXCHANGE, ALIVE, STOP):
        raise ValueError(f"a message of unknown kind {kind}: something else uses the group.")
    if theirs != count:
        raise ValueError(
            f"learner {learner} averages {count} numbers, but learner {peer} {theirs}: start all "
            "learners with the same model."
        )
    return kind
