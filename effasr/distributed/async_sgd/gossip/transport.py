"""How numbers get from one learner to another."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class PeerLost(Exception):
    """The other learner cannot be reached, and will not be again."""


class Transport(Protocol):
    """Messages in order between two learners; a message may wait for its receiver.

    All of it may be called from several threads at once, for different peers.
    """

    def send(self, tensor: Tensor, peer: int, timeout_s: float) -> None:
        """Return when ``tensor`` may be overwritten.

        Raises:
            PeerLost: The peer is gone, or took nothing of it for ``timeout_s``, or `close` was
                called.
        """
        ...

    def receive(self, tensor: Tensor, peer: int, timeout_s: float) -> None:
        """Fill ``tensor``.

        Raises:
            PeerLost: As `send`.
        """
        ...

    def close(self) -> None:
        """End all connections, and at once every call that waits; any thread may call it."""
        ...
