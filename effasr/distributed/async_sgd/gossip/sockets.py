"""TCP connections between learners, one for each pair of neighbours."""

from __future__ import annotations

import itertools
import json
import os
import socket
import ssl
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from effasr.distributed.async_sgd.gossip.config import TLSConfig, is_active, tls_context
from effasr.distributed.async_sgd.gossip.listener import (
    INTERFACES_VARIABLE,
    HandshakeError,
    Listener,
    introduce,
    own_addresses,
)


class PeerLost(Exception):
    """The other learner cannot be reached any more."""


# gloo is not used: when a connection breaks within a message, it often does not wake the receiver,
# and the timeout of one call closes the connections to all. Here the loss of a neighbour
# immediately raises an error in the calls that concern it, and `SocketTransport.close` ends every
# call.

# Timeout for one address of a neighbour, which may belong to another network; then the next address
# is tried. A neighbour that was reached may be slow to answer.
_CONNECT_S, _WELCOME_S = 5.0, 30.0
# A neighbour that receives too many connections may drop that of this learner.
_ROUNDS, _PAUSE_S = 3, 0.2
# Number of bytes per system call: large enough to amortise it, small enough for a useful timeout.
_CHUNK = 1 << 22

_transports: weakref.WeakSet[SocketTransport] = weakref.WeakSet()


class SocketTransport:
    """The connections of one learner to its neighbours: ordered messages between two learners.

    Methods may be called from any thread, also concurrently for different peers.

    Odd-numbered learners listen, and write their addresses and a key into the store; even-numbered
    ones connect. Both prove that they have the key
    (`effasr.distributed.async_sgd.gossip.listener`), so neither a foreign program nor the same
    address on another node is mistaken for the neighbour. Anyone who can read the store of the run
    can read the key. Data are encrypted only with TLS.
    """

    def __init__(
        self,
        store: Store,
        learner: int,
        peers: Iterable[int],
        timeout_s: float,
        tls: TLSConfig | None = None,
    ) -> None:
        # Number of dropped connections to this learner that did not come from a neighbour
        self.rejected_connections = 0
        self._connections: dict[int, socket.socket] = {}
        self._missing: dict[int, str] = {}
        self._closed = False
        _transports.add(self)
        until, context = time.monotonic() + timeout_s, None
        connects = is_active(learner)
        if tls is not None:
            protocol = ssl.PROTOCOL_TLS_CLIENT if connects else ssl.PROTOCOL_TLS_SERVER
            context = tls_context(tls, protocol)
        if connects:
            for peer in peers:
                self._connect(store, learner, peer, until, context)
        else:
            self._listen(store, learner, set(peers), until, context)

    def send(self, tensor: Tensor, peer: int, timeout_s: float) -> None:
        """Send a contiguous tensor on the host; return when it may be overwritten."""
        connection, data, begin = self._to(peer), _bytes(tensor), 0
        connection.settimeout(timeout_s)
        try:
            while begin < len(data):
                begin += connection.send(data[begin : begin + _CHUNK])
        except OSError as error:
            raise self._lost(error, timeout_s) from error

    def receive(self, tensor: Tensor, peer: int, timeout_s: float) -> None:
        connection, data, begin = self._to(peer), _bytes(tensor), 0
        connection.settimeout(timeout_s)
        try:
            while begin < len(data):
                count = connection.recv_into(data[begin : begin + _CHUNK])
                if not count:
                    raise ConnectionResetError("the connection was closed by the other side")
                begin += count
        except OSError as error:
            raise self._lost(error, timeout_s) from error

    def close(self) -> None:
        self._closed = True
        for connection in self._connections.values():
            # `close` is not called here: another thread may be about to use the descriptor, whose
            # number could by then belong to another file.
            with suppress(OSError):
                # The method of an SSLSocket would switch to plain text before it shuts down.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def __del__(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def _to(self, peer: int) -> socket.socket:
        if self._closed:
            raise PeerLost("the connections of this learner were closed")
        if peer in self._missing:
            raise PeerLost(self._missing[peer])
        return self._connections[peer]

    def _lost(self, error: OSError, timeout_s: float) -> PeerLost:
        if self._closed:
            return PeerLost("the connections of this learner were closed")
        if isinstance(error, TimeoutError):
            return PeerLost(f"it has been silent for {timeout_s:g} s")
        return PeerLost(str(error))

    def _keep(self, peer: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[peer] = connection

    def _connect(
        self, store: Store, learner: int, peer: int, until: float, context: ssl.SSLContext | None
    ) -> None:
        key = f"listening/{peer}"
        while not store.check([key]):
            if time.monotonic() > until:
                self._missing[peer] = "it did not connect"
                return
            time.sleep(0.01)
        where = json.loads(store.get(key))
        tried: dict[str, str] = {}
        attempts = itertools.count()
        for number in range(_ROUNDS):
            if number:
                time.sleep(_PAUSE_S)
            for address, port in where["endpoints"]:
                try:
                    connection = introduce(
                        socket.create_connection((address, port), _CONNECT_S),
                        bytes.fromhex(where["key"]),
                        connecting=learner,
                        listening=peer,
                        until=time.monotonic() + _WELCOME_S,
                        context=context,
                        attempt=min(next(attempts), 255),
                    )
                except (OSError, HandshakeError) as error:
                    tried[address] = f"port {port}: {getattr(error, 'strerror', None) or error}"
                    continue
                self._keep(peer, connection)
                return
        every = "; ".join(f"{address}: {reason}" for address, reason in tried.items())
        self._missing[peer] = (
            f"it cannot be reached at any of its addresses ({every}); {INTERFACES_VARIABLE} names "
            "the interface to use"
        )

    def _listen(
        self,
        store: Store,
        learner: int,
        peers: set[int],
        until: float,
        context: ssl.SSLContext | None,
    ) -> None:
        with Listener(own_addresses(), learner, context) as listener:
            where = {"endpoints": listener.endpoints, "key": listener.key.hex()}
            store.set(f"listening/{learner}", json.dumps(where))
            for peer, connection in listener.accept(peers, until).items():
                self._keep(peer, connection)
            self.rejected_connections = listener.rejected_connections
        self._missing = dict.fromkeys(peers - self._connections.keys(), "it did not connect")


def _bytes(tensor: Tensor) -> memoryview:
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    return tensor.detach().flatten().view(torch.uint8).numpy().data


def _let_go() -> None:
    """Close connections in a forked process: neighbours would otherwise wait for its end."""
    for transport in _transports:
        for connection in transport._connections.values():
            connection.close()


os.register_at_fork(after_in_child=_let_go)
