"""The passive side of gossip averaging, which answers exchanges."""

from __future__ import annotations

import queue
import threading

import torch
from torch import Tensor

from effasr.distributed.async_sgd.gossip import wire
from effasr.distributed.async_sgd.gossip.mixer import Mixer
from effasr.distributed.async_sgd.gossip.peers import Peers
from effasr.distributed.async_sgd.gossip.transport import PeerLost, Transport

# Number of concurrent exchanges: one is received while another is answered.
_BUFFERS = 2

# An active neighbour is silent while it waits for other learners, up to their timeout.
_PATIENCE = 3


class Passive:
    """Answers each neighbour in a separate thread, so that none waits for another's updates.

    A neighbour may be silent for up to three times ``timeout_s``.
    """

    def __init__(self, mixer: Mixer, peers: Peers, transport: Transport, timeout_s: float) -> None:
        self._mixer = mixer
        self._peers = peers
        self._transport = transport
        self._timeout_s = _PATIENCE * timeout_s
        self._buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(min(_BUFFERS, len(peers.living))):
            self._buffers.put(torch.empty(mixer.count))
        self._threads: dict[int, threading.Thread] = {}
        self._lock = threading.Lock()
        self.exchanges = 0  # Number of completed exchanges
        self.bytes = 0  # Bytes of weights, sent and received

    def start(self) -> None:
        """Start the threads of the remaining neighbours."""
        self._threads = {
            peer: threading.Thread(
                target=self._run, args=(peer,), name=f"gossip with {peer}", daemon=True
            )
            for peer in self._peers.living
        }
        for thread in self._threads.values():
            thread.start()

    def publish(self) -> None:
        """Do nothing: the active neighbours begin exchanges."""

    def stop(self) -> None:
        """Do nothing: each neighbour reports when it has finished."""

    def is_running(self) -> bool:
        """Return whether a remaining neighbour may still begin an exchange."""
        return any(thread.is_alive() for thread in self._threads.values())

    def _run(self, peer: int) -> None:
        try:
            self._serve(peer)
        except Exception as error:
            self._peers.fail(peer, error)

    def _serve(self, peer: int) -> None:
        """Answer a neighbour until it stops or is lost."""
        message = wire.blank()
        try:
            while True:
                self._transport.receive(message, peer, self._timeout_s)
                kind = wire.read(message, self._mixer.count, learner=self._peers.learner, peer=peer)
                if kind == wire.STOP:
                    return
                if kind == wire.EXCHANGE:
                    self._exchange(peer)
        except PeerLost as lost:
            self._peers.lose(peer, str(lost))

    def _exchange(self, peer: int) -> None:
        buffer = self._buffers.get()
        try:
            self._transport.receive(buffer, peer, self._timeout_s)
            self._mixer.answer(buffer)
            self._transport.send(buffer, peer, self._timeout_s)
        finally:
            self._buffers.put(buffer)
        with self._lock:
            self.bytes += 2 * buffer.nbytes
            self.exchanges += 1
