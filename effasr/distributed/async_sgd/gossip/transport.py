"""The interface of connections between learners."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class PeerLost(Exception):
    """The other learner cannot be reached, and never will be again."""


class Transport(Protocol):
    """Ordered messages between two learners; a message may wait for its receiver.

    Any thread may call its methods, several at once for different peers.
    """

    def send(self, tensor: Tensor, peer: int, timeout_s: float) -> None:
        """Return when ``tensor`` may be overwritten.

        Raises:
            PeerLost: The peer is gone, or accepted nothing for ``timeout_s``, or `close` was
                called.
        """
        ...

    def receive(self, tensor: Tensor, peer: int, timeout_s: float) -> None:
        """Fill ``tensor``; raises as `send`."""
        ...

    def close(self) -> None:
        """End all connections and every call that waits."""
        ...
