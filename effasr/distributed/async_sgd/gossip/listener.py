"""Listening side of a learner: accepts its neighbours and drops all other connections."""

from __future__ import annotations

import errno
import logging
import secrets
import selectors
import socket
import ssl
import time
from collections.abc import Collection, Sequence
from typing import Self

from effasr.distributed.async_sgd.gossip.addresses import INTERFACES_VARIABLE
from effasr.distributed.async_sgd.gossip.handshake import (
    HELLO_BYTES,
    KEY_BYTES,
    Challenge,
    Stranger,
)

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""Seconds from the acceptance of a connection to the end of its handshake."""

_PENDING = 128
"""Largest number of concurrent handshakes; a further connection replaces the oldest."""

_WAIT = (BlockingIOError, ssl.SSLWantReadError)
_NO_DESCRIPTOR = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE_S = 0.05


class Listener:
    """Listens on a free port of each given address."""

    def __init__(
        self, addresses: Sequence[str], learner: int, context: ssl.SSLContext | None = None
    ) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)  # Key that neighbours must prove to have
        self.strangers = 0  # Number of dropped connections
        self._learner, self._context = learner, context
        self._reason = ""
        self._sockets: list[socket.socket] = []
        refused = []
        for address in addresses:
            try:
                self._sockets.append(_listen(address))
            except OSError as error:
                refused.append(f"{address}: {error.strerror or error}")
        if not self._sockets:
            raise OSError(
                f"no port can be opened at the addresses of this node ({'; '.join(refused)}); "
                f"{INTERFACES_VARIABLE} names the interface to use."
            )
        self.endpoints = [own.getsockname()[:2] for own in self._sockets]  # Addresses and ports

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for own in self._sockets:
            own.close()

    def accept(self, peers: Collection[int], until: float) -> dict[int, socket.socket]:
        """Wait until all neighbours have connected.

        Handshakes run concurrently, so that a silent connection does not delay others.
        """
        found: dict[int, socket.socket] = {}
        # Sorted by age; as the time limit is the same for all, the first expires first.
        pending: dict[socket.socket, _Arrival] = {}
        with selectors.DefaultSelector() as selector:
            for own in self._sockets:
                selector.register(own, selectors.EVENT_READ)
            while len(found) < len(peers) and (left := until - time.monotonic()) > 0:
                if pending:
                    oldest = next(iter(pending.values()))
                    left = max(0.0, min(left, oldest.until - time.monotonic()))
                for ready, _ in selector.select(left):
                    arrival = ready.data
                    if arrival is None:
                        assert isinstance(ready.fileobj, socket.socket)
                        self._welcome(ready.fileobj, selector, pending)
                    elif arrival.connection in pending:
                        self._advance(arrival, selector, pending, peers, found)
                for arrival in list(pending.values()):
                    if arrival.until > time.monotonic():
                        break
                    self._drop(arrival, selector, pending, "it was silent")
            for arrival in list(pending.values()):
                self._drop(arrival, selector, pending, "it was silent")
        if self.strangers:
            log.warning(
                "learner %d dropped %d connections that are not of this run (the last: %s)",
                self._learner,
                self.strangers,
                self._reason,
            )
        return found

    def _welcome(
        self,
        own: socket.socket,
        selector: selectors.BaseSelector,
        pending: dict[socket.socket, _Arrival],
    ) -> None:
        """Accept a connection and begin its handshake."""
        try:
            connection, address = own.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                if pending:
                    self._drop(next(iter(pending.values())), selector, pending, "too many came")
                else:
                    # The connection stays readable: without a pause this would be a busy loop.
                    time.sleep(_PAUSE_S)
            return
        if len(pending) >= _PENDING:
            self._drop(next(iter(pending.values())), selector, pending, "too many came")
        connection.setblocking(False)
        arrival = _Arrival(connection, address[0], Challenge(self.key, self._learner))
        try:
            if self._context is not None:
                arrival.connection = self._context.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            else:
                arrival.challenge_other()
        except OSError as error:
            arrival.connection.close()
            self._count(arrival, str(error))
            return
        pending[arrival.connection] = arrival
        selector.register(arrival.connection, selectors.EVENT_READ, arrival)

    def _advance(
        self,
        arrival: _Arrival,
        selector: selectors.BaseSelector,
        pending: dict[socket.socket, _Arrival],
        peers: Collection[int],
        found: dict[int, socket.socket],
    ) -> None:
        """Continue a handshake with the data that have arrived."""
        try:
            peer = arrival.advance()
            if peer is None:
                return
            if peer not in peers:
                raise Stranger(f"learner {peer} is not a neighbour")
        except (OSError, Stranger) as error:
            self._drop(arrival, selector, pending, str(error))
            return
        selector.unregister(arrival.connection)
        del pending[arrival.connection]
        if peer in found:
            # The peer missed the reply to its first handshake and connected again.
            found[peer].close()
        arrival.connection.setblocking(True)
        found[peer] = arrival.connection

    def _drop(
        self,
        arrival: _Arrival,
        selector: selectors.BaseSelector,
        pending: dict[socket.socket, _Arrival],
        reason: str,
    ) -> None:
        selector.unregister(arrival.connection)
        del pending[arrival.connection]
        arrival.connection.close()
        self._count(arrival, reason)

    def _count(self, arrival: _Arrival, reason: str) -> None:
        self.strangers += 1
        self._reason = f"from {arrival.address}: {reason}"
        log.debug("learner %d dropped a connection %s", self._learner, self._reason)


class _Arrival:
    """A connection in its handshake."""

    def __init__(self, connection: socket.socket, address: str, challenge: Challenge) -> None:
        self.connection: socket.socket = connection
        self.address = address
        self.until = time.monotonic() + HANDSHAKE_S
        self._challenge = challenge
        self._challenged = False
        self._received = bytearray()

    def challenge_other(self) -> None:
        """Send the first message."""
        self._send(self._challenge.nonce)
        self._challenged = True

    def advance(self) -> int | None:
        """Read available data; return the number of the learner once it is authenticated."""
        try:
            if not self._challenged:
                if isinstance(self.connection, ssl.SSLSocket):
                    self.connection.do_handshake()
                self.challenge_other()
            # Read until nothing is left: TLS may hold data that the selector does not see.
            while missing := HELLO_BYTES - len(self._received):
                more = self.connection.recv(missing)
                if not more:
                    raise Stranger("it closed the connection")
                self._received += more
        except _WAIT:
            return None
        peer, answer = self._challenge.verify(bytes(self._received))
        self._send(answer)
        return peer

    def _send(self, message: bytes) -> None:
        # This cannot block: the send buffer of a new connection has room for the message.
        if self.connection.send(message) < len(message):
            raise Stranger("it does not read what it is sent")


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    own = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
    own.setblocking(False)
    return own
