"""Mutual authentication of two learners on a new connection.

The learner that listens draws a key and writes it into the store of the run. The key is never
sent: each side proves that it has the key by an HMAC-SHA256 over the nonces of both sides::

    listens  -> connects   nonce
    connects -> listens    version, numbers of both learners, nonce, HMAC in the role "connects"
    listens  -> connects   HMAC in the role "listens"

A recorded message does not fit the nonces of another connection. A message of one side is not
valid for the other side, because the role is part of the HMAC. All messages have fixed
sizes. A program on the path between two learners can still read and change what follows; TLS
(`effasr.distributed.async_sgd.gossip.tls`) prevents that.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time

_VERSION = b"effasr-1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HELLO = struct.Struct(f"!8sqq{_NONCE_BYTES}s{_PROOF_BYTES}s")
_CONNECTS, _LISTENS = b"connects", b"listens"

KEY_BYTES = 32
HELLO_BYTES = _HELLO.size
"""Size of the message of the side that connects."""


class Stranger(Exception):
    """The other side did not authenticate as a member of this run; the message has the reason."""


class Challenge:
    """The listening side of one handshake."""

    def __init__(self, key: bytes, learner: int) -> None:
        self._key, self._learner = key, learner
        self.nonce = secrets.token_bytes(_NONCE_BYTES)  # The first message

    def verify(self, hello: bytes) -> tuple[int, bytes]:
        """Return the number of the learner that connected, and the reply to it."""
        version, connecting, listening, nonce, proof = _HELLO.unpack(hello)
        if version != _VERSION:
            raise Stranger("it speaks another protocol")
        if listening != self._learner:
            raise Stranger("it looks for another learner")
        about = self._key, connecting, listening, self.nonce, nonce
        if not hmac.compare_digest(proof, _proof(_CONNECTS, *about)):
            raise Stranger("it does not have the key of this run")
        return connecting, _proof(_LISTENS, *about)


def introduce(
    connection: socket.socket, key: bytes, *, connecting: int, listening: int, until: float
) -> None:
    """Perform the handshake of the connecting side."""
    theirs, own = _receive(connection, _NONCE_BYTES, until), secrets.token_bytes(_NONCE_BYTES)
    about = key, connecting, listening, theirs, own
    hello = _HELLO.pack(_VERSION, connecting, listening, own, _proof(_CONNECTS, *about))
    connection.settimeout(_left(until))
    connection.sendall(hello)
    answer = _receive(connection, _PROOF_BYTES, until)
    if not hmac.compare_digest(answer, _proof(_LISTENS, *about)):
        raise Stranger("another program answers")


def _proof(
    role: bytes, key: bytes, connecting: int, listening: int, first: bytes, second: bytes
) -> bytes:
    """Return the HMAC; ``first`` is the nonce of the listening side."""
    message = struct.pack("!8s8sqq", _VERSION, role, connecting, listening) + first + second
    return hmac.digest(key, message, "sha256")


def _receive(connection: socket.socket, size: int, until: float) -> bytes:
    received = bytearray()
    while len(received) < size:
        connection.settimeout(_left(until))
        more = connection.recv(size - len(received))
        if not more:
            raise Stranger("it closed the connection")
        received += more
    return bytes(received)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("it did not answer in time")
    return left
