"""The active side of gossip averaging, which begins exchanges."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from effasr.distributed.async_sgd.gossip import wire
from effasr.distributed.async_sgd.gossip.mixer import Mixer
from effasr.distributed.async_sgd.gossip.peers import Peers
from effasr.distributed.async_sgd.gossip.transport import PeerLost, Transport

# Largest silence towards a neighbour, as a fraction of its timeout.
_SIGN_OF_LIFE = 1 / 4


class Active:
    """Performs one exchange per publication, or as many as the network allows, in one thread."""

    def __init__(
        self,
        mixer: Mixer,
        peers: Peers,
        transport: Transport,
        timeout_s: float,
        choose: Callable[[Sequence[int], int], int],
    ) -> None:
        self._mixer = mixer
        self._peers = peers
        self._transport = transport
        self._timeout_s = timeout_s
        self._choose = choose
        self._changed = threading.Condition()
        self._published = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.exchanges = 0  # Number of completed exchanges
        self.bytes = 0  # Bytes of weights, sent and received

    def start(self) -> None:
        """Start the thread that waits for publications."""
        self._published = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="gossip", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Request an exchange, which follows the one in progress, if any."""
        with self._changed:
            self._published = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Announce to the neighbours that no exchange follows the one in progress."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def is_running(self) -> bool:
        """Return whether the thread has work left."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        peer = None
        try:
            got, told = torch.empty(self._mixer.count), time.monotonic()
            while (kind := self._next()) != wire.STOP:
                if kind == wire.EXCHANGE and self._peers.living:
                    peer = self._choose(self._peers.living, self.exchanges)
                    self._exchange(peer, got)
                # With many neighbours, one may not be chosen for longer than its timeout.
                if time.monotonic() - told >= self._timeout_s * _SIGN_OF_LIFE:
                    self._send_all(wire.ALIVE)
                    told = time.monotonic()
            self._send_all(wire.STOP)
        except Exception as error:
            self._peers.fail(peer, error)

    def _next(self) -> int:
        """Wait for the next action and return its message kind."""
        with self._changed:
            # A passive learner cannot distinguish a long computation from a lost learner.
            self._changed.wait_for(
                lambda: self._published or self._stopping, timeout=self._timeout_s * _SIGN_OF_LIFE
            )
            if self._stopping:
                return wire.STOP
            published, self._published = self._published, False
            return wire.EXCHANGE if published else wire.ALIVE

    def _exchange(self, peer: int, got: Tensor) -> None:
        """Average with a neighbour, or mark it as lost."""
        sent = self._mixer.snapshot()
        try:
            header = wire.header(wire.EXCHANGE, sent.numel())
            self._transport.send(header, peer, self._timeout_s)
            self._transport.send(sent, peer, self._timeout_s)
            self._transport.receive(got, peer, self._timeout_s)
        except PeerLost as lost:
            self._peers.lose(peer, str(lost))
            return
        self._mixer.average(got)
        self.bytes += 2 * got.nbytes
        self.exchanges += 1

    def _send_all(self, kind: int) -> None:
        for peer in self._peers.living:
            try:
                self._transport.send(wire.header(kind, self._mixer.count), peer, self._timeout_s)
            except PeerLost as lost:
                self._peers.lose(peer, str(lost))
