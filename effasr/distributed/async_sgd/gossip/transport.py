"""The interface of connections between learners."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class PeerLost(Exception):
    """The other learner cannot be reached any more."""


class Transport(Protocol):
    """Ordered messages between two learners; sending may wait for the receiver.

    Methods may be called from any thread, also concurrently for different peers.
    """

    def send(self, tensor: Tensor, peer: int, timeout_s: float) -> None:
        """Send ``tensor``; return when it may be overwritten."""
        ...

    def receive(self, tensor: Tensor, peer: int, timeout_s: float) -> None:
        """Fill ``tensor``; raises as `send`."""
        ...

    def close(self) -> None:
        """End all connections and all waiting calls."""
        ...
