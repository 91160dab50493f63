"""Connections between learners: TCP, one for each pair of neighbours.

gloo is not used: when a connection breaks within a message, it often does not wake the receiver,
    and the timeout of one call closes the connections to all. Here the loss of a neighbour is
    immediately an error in the calls that concern it, and `SocketTransport.close` ends every call.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from effasr.distributed.async_sgd.gossip.addresses import INTERFACES_VARIABLE, own_addresses
from effasr.distributed.async_sgd.gossip.topology import is_active
from effasr.distributed.async_sgd.gossip.transport import PeerLost

log = logging.getLogger(__name__)

_GREETING = struct.Struct("!16sq")
_WELCOME = b"\x06"
# Timeout of one address of a neighbour, which may belong to another network; the next address is
# tried afterwards. A neighbour that was reached may be slow to answer.
_CONNECT_S, _WELCOME_S = 5.0, 30.0
# Bytes of one system call: large enough to amortise it, and bounds what a timeout covers.
_CHUNK = 1 << 22

_transports: weakref.WeakSet[SocketTransport] = weakref.WeakSet()


class SocketTransport:
    """The connections of one learner to its neighbours; a `Transport`.

    Learners of odd number listen, and write their addresses into the store; those of even number
    connect. A secret from the store authenticates them, so that neither a foreign program nor the
    same address on another node is taken for the neighbour. Data are not encrypted.

    Args:
        store: Store that all learners share; used by nothing else.
        learner: Number of this learner.
        peers: Its neighbours, odd where it is even.
        timeout_s: Seconds to wait for them. A neighbour missing afterwards is lost: the first
            message to or from it raises the error.
    """

    def __init__(self, store: Store, learner: int, peers: Iterable[int], timeout_s: float) -> None:
        self._connections: dict[int, socket.socket] = {}
        self._missing: dict[int, str] = {}
        self._closed = False
        _transports.add(self)
        until = time.monotonic() + timeout_s
        if is_active(learner):
            for peer in peers:
                self._connect(store, learner, peer, until)
        else:
            self._listen(store, learner, set(peers), until)

    def send(self, tensor: Tensor, peer: int, timeout_s: float) -> None:
        """See `Transport`; ``tensor`` is contiguous and on the host."""
        connection, data, begin = self._to(peer), _bytes(tensor), 0
        connection.settimeout(timeout_s)
        try:
            while begin < len(data):
                begin += connection.send(data[begin : begin + _CHUNK])
        except OSError as error:
            raise self._lost(error, timeout_s) from error

    def receive(self, tensor: Tensor, peer: int, timeout_s: float) -> None:
        """See `Transport`; ``tensor`` is contiguous and on the host."""
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
        """See `Transport`."""
        self._closed = True
        for connection in self._connections.values():
            # Not `close`: another thread may be about to use the descriptor, whose number could
            # then belong to another file.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

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

    def _connect(self, store: Store, learner: int, peer: int, until: float) -> None:
        """Find the address of a neighbour under which it answers."""
        key = f"listening/{peer}"
        while not store.check([key]):
            if time.monotonic() > until:
                self._missing[peer] = "it did not connect"
                return
            time.sleep(0.01)
        where = json.loads(store.get(key))
        tried = []
        for address in where["addresses"]:
            try:
                connection = socket.create_connection((address, where["port"]), _CONNECT_S)
            except OSError as error:
                tried.append(f"{address}: {error.strerror or error}")
                continue
            try:
                connection.settimeout(_WELCOME_S)
                connection.sendall(_GREETING.pack(bytes.fromhex(where["secret"]), learner))
                if connection.recv(1) == _WELCOME:
                    self._keep(peer, connection)
                    return
                tried.append(f"{address}: another program answers")
            except OSError as error:
                tried.append(f"{address}: {error.strerror or error}")
            connection.close()
        self._missing[peer] = (
            f"it cannot be reached at port {where['port']} of any of its addresses ("
            f"{'; '.join(tried)}); {INTERFACES_VARIABLE} names the interface to use"
        )

    def _listen(self, store: Store, learner: int, peers: set[int], until: float) -> None:
        """Wait until all neighbours have connected."""
        secret = secrets.token_bytes(16)
        with _listener() as listener:
            where = {
                "addresses": own_addresses(),
                "port": listener.getsockname()[1],
                "secret": secret.hex(),
            }
            store.set(f"listening/{learner}", json.dumps(where))
            while peers and (left := until - time.monotonic()) > 0:
                listener.settimeout(left)
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    break
                peer = _greeted(connection, secret)
                if peer in peers:
                    self._keep(peer, connection)
                    peers.remove(peer)
                else:
                    connection.close()
        self._missing = dict.fromkeys(peers, "it did not connect")


def _listener() -> socket.socket:
    """Listen at a free port of all interfaces; the greeting authenticates connections."""
    backlog = socket.SOMAXCONN
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
        )
    return socket.create_server(("", 0), backlog=backlog)


def _greeted(connection: socket.socket, secret: bytes) -> int | None:
    """Return the number of the learner that connected; None for any other program."""
    connection.settimeout(_CONNECT_S)
    greeting = bytearray()
    try:
        while len(greeting) < _GREETING.size:
            more = connection.recv(_GREETING.size - len(greeting))
            if not more:
                return None
            greeting += more
        theirs, learner = _GREETING.unpack(greeting)
        if not secrets.compare_digest(theirs, secret):
            return None
        connection.sendall(_WELCOME)
    except OSError as error:
        log.debug("a connection sent no greeting: %s", error)
        return None
    return learner


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor."""
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    return tensor.detach().flatten().view(torch.uint8).numpy().data


def _let_go() -> None:
    """Close the connections in a forked process, such as a data worker.

    Otherwise the neighbours of a killed learner would wait as long as its workers live.
    """
    for transport in _transports:
        for connection in transport._connections.values():
            connection.close()


os.register_at_fork(after_in_child=_let_go)
