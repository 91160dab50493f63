"""Hostile clients at the ports of learners, and hostile servers in their place."""

import json
import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch
from torch.distributed import HashStore

from effasr.distributed.async_sgd.gossip import listener
from effasr.distributed.async_sgd.gossip.config import GossipConfig
from effasr.distributed.async_sgd.gossip.gossip import Gossip
from effasr.distributed.async_sgd.gossip.listener import (
    HELLO_BYTES,
    KEY_BYTES,
    Challenge,
    HandshakeError,
    Listener,
    introduce,
    own_addresses,
)
from effasr.distributed.async_sgd.gossip.sockets import SocketTransport

Attack = Callable[[tuple[str, int], threading.Event], None]


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def endpoint_of(store: HashStore, learner: int = 1) -> tuple[str, int]:
    while not store.check([f"listening/{learner}"]):
        time.sleep(0.01)
    address, port = json.loads(store.get(f"listening/{learner}"))["endpoints"][0]
    return address, port


def talk(active: SocketTransport, passive: SocketTransport, times: int = 20):
    sent = torch.arange(10_000.0)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(times):
            got = torch.zeros(10_000)
            sending = pool.submit(active.send, sent, 1, 20.0)
            passive.receive(got, 0, 20.0)
            sending.result()
            assert torch.equal(got, sent)
            sending = pool.submit(passive.send, got, 0, 20.0)
            active.receive(got.clone(), 1, 20.0)
            sending.result()


def garbage(endpoint: tuple[str, int], stop: threading.Event):
    while not stop.is_set():
        with suppress(OSError), socket.create_connection(endpoint, 1.0) as client:
            client.sendall(os.urandom(secrets.choice((1, 87, 88, 89, 5000))))
            client.settimeout(0.2)
            client.recv(1000)


def slow_drip(endpoint: tuple[str, int], stop: threading.Event):
    with suppress(OSError), socket.create_connection(endpoint, 1.0) as client:
        while not stop.wait(0.05):
            client.sendall(b"e")


def silence(endpoint: tuple[str, int], stop: threading.Event):
    with suppress(OSError), socket.create_connection(endpoint, 1.0):
        stop.wait()


def huge_length(endpoint: tuple[str, int], stop: threading.Event):
    """As an exchange of 2 ** 62 numbers, without a handshake."""
    with suppress(OSError), socket.create_connection(endpoint, 1.0) as client:
        client.sendall(torch.tensor([1, 2**62]).numpy().tobytes())
        while not stop.is_set():
            client.sendall(bytes(1 << 16))


def echo(endpoint: tuple[str, int], stop: threading.Event):
    with suppress(OSError), socket.create_connection(endpoint, 1.0) as client:
        client.settimeout(0.5)
        while not stop.is_set():
            client.sendall(client.recv(1000))


@contextmanager
def under(attack: Attack, endpoint: tuple[str, int], clients: int) -> Iterator[None]:
    stop = threading.Event()
    with ThreadPoolExecutor(clients) as pool:
        for _ in range(clients):
            pool.submit(attack, endpoint, stop)
        time.sleep(0.2)
        try:
            yield
        finally:
            stop.set()


@pytest.mark.parametrize("attack", [garbage, slow_drip, silence, huge_length, echo])
def test_two_learners_connect_and_exchange_under_attack(attack, monkeypatch, caplog):
    monkeypatch.setattr(listener, "HANDSHAKE_S", 1.0)
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(SocketTransport, store, 1, [0], 30.0)
        with under(attack, endpoint_of(store), clients=8):
            began = time.monotonic()
            active = SocketTransport(store, 0, [1], 30.0)
            passive = listening.result()
            assert time.monotonic() - began < 15.0
            talk(active, passive)
    assert passive.rejected_connections >= 8
    assert (
        f"learner 1 dropped {passive.rejected_connections} connections that are not of this run"
        in (caplog.text)
    )


def test_a_huge_length_of_an_authenticated_peer_takes_no_memory():
    """A relay that changes the header, or a neighbour with another model."""
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(SocketTransport, store, 1, [0], 30.0)
        endpoint = endpoint_of(store)
        key = bytes.fromhex(json.loads(store.get("listening/1"))["key"])
        with socket.create_connection(endpoint, 5.0) as client:
            introduce(client, key, connecting=0, listening=1, until=time.monotonic() + 5.0)
            gossip = Gossip(
                [torch.zeros(10)], learner=1, learners=2, transport=listening.result(),
                config=GossipConfig(),
            )  # fmt: skip
            gossip.start()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with suppress(OSError):
                client.sendall(torch.tensor([1, 2**62]).numpy().tobytes())
                client.sendall(bytes(1 << 16))
            failure = "learner 1 averages 10 numbers, but learner 0 4611686018427387904"
            with pytest.raises(RuntimeError, match=failure):
                gossip.drain()
            # KiB: no more than a test allocates by the way.
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
            gossip.abandon()


def test_a_thousand_connections_keep_no_learner_out(monkeypatch):
    monkeypatch.setattr(listener, "_PENDING", 16)
    store, clients = HashStore(), []
    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(SocketTransport, store, 1, [0], 60.0)
        endpoint = endpoint_of(store)
        try:
            # As many at a time as the descriptors of a test process allow.
            for number in range(1000):
                client = socket.create_connection(endpoint, 5.0)
                clients.append(client)
                if number >= 300:
                    clients[number - 300].close()
            active = SocketTransport(store, 0, [1], 30.0)
            talk(active, listening.result())
        finally:
            for client in clients:
                client.close()
    assert listening.result().rejected_connections == 1000


def test_one_that_says_nothing_or_little_is_dropped_in_time(monkeypatch):
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.3)
    with Listener(["127.0.0.1"], 1) as local, ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(local.accept, {0}, time.monotonic() + 4.0)
        with socket.create_connection(tuple(local.endpoints[0]), 5.0) as client:
            assert len(client.recv(100)) == 32
            began = time.monotonic()
            with suppress(OSError):
                while time.monotonic() - began < 3.5:
                    client.sendall(b"x")
                    time.sleep(0.02)
            # Not 0.3 s after the last byte: after the first moment.
            assert time.monotonic() - began < 3.0
        assert accepting.result() == {}
        assert local.rejected_connections == 1


def test_what_was_recorded_cannot_be_replayed():
    """A relay records the handshake of learner 0; the listener waits for learner 2 as well."""
    recorded: list[bytes] = []
    with Listener(["127.0.0.1"], 1) as local, ThreadPoolExecutor(2) as pool:
        accepting = pool.submit(local.accept, {0, 2}, time.monotonic() + 2.0)
        endpoint = tuple(local.endpoints[0])
        with socket.create_server(("127.0.0.1", 0)) as relay:

            def record():
                client, _ = relay.accept()
                with client, socket.create_connection(endpoint) as server:
                    client.sendall(server.recv(100))
                    recorded.append(client.recv(HELLO_BYTES))
                    server.sendall(recorded[0])
                    client.sendall(server.recv(100))

            relaying = pool.submit(record)
            with socket.create_connection(relay.getsockname()) as first:
                until = time.monotonic() + 5.0
                introduce(first, local.key, connecting=0, listening=1, until=until)
            relaying.result()
        # The key was not on the wire.
        assert local.key not in recorded[0]
        with socket.create_connection(endpoint, 5.0) as again:
            assert len(again.recv(100)) == 32
            again.sendall(recorded[0])
            assert again.recv(100) == b""
        result = accepting.result()
    assert list(result) == [0]
    result[0].close()
    assert local.rejected_connections == 1


def test_a_proof_is_valid_for_one_role_one_connection_and_one_learner():
    key = secrets.token_bytes(KEY_BYTES)
    challenge = Challenge(key, 1)
    hello, answer = hello_to(challenge.nonce, key), None
    peer, answer = challenge.verify(hello)
    assert peer == 0
    with pytest.raises(HandshakeError, match="does not have the key"):
        Challenge(key, 1).verify(hello)
    with pytest.raises(HandshakeError, match="looks for another learner"):
        Challenge(key, 3).verify(hello)
    with pytest.raises(HandshakeError, match="does not have the key"):
        challenge.verify(hello[:-32] + answer)
    for position in range(8, HELLO_BYTES):
        changed = bytearray(hello)
        changed[position] ^= 1
        with pytest.raises(HandshakeError):
            challenge.verify(bytes(changed))
    with pytest.raises(HandshakeError, match="does not have the key"):
        challenge.verify(hello_to(challenge.nonce, secrets.token_bytes(KEY_BYTES)))


def hello_to(nonce: bytes, key: bytes) -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        until = time.monotonic() + 5.0
        call = pool.submit(introduce, ours, key, connecting=0, listening=1, until=until)
        theirs.sendall(nonce)
        hello = theirs.recv(1000)
        theirs.shutdown(socket.SHUT_RDWR)
        with pytest.raises(HandshakeError, match="closed the connection"):
            call.result()
    return hello


@pytest.mark.parametrize("answer", ["reflection", "garbage", "drip", "silence", "end"])
def test_a_false_server_is_not_taken_for_a_learner(answer):
    ours, theirs = socket.socketpair()
    key = secrets.token_bytes(KEY_BYTES)
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        call = pool.submit(introduce, ours, key, connecting=0, listening=1, until=began + 0.5)
        if answer == "drip":
            with suppress(OSError):
                while not call.done():
                    theirs.sendall(b"x")
                    time.sleep(0.1)
        elif answer != "silence":
            theirs.sendall(bytes(32))
            hello = theirs.recv(1000)
            assert len(hello) == HELLO_BYTES
            assert key not in hello
            if answer == "end":
                theirs.shutdown(socket.SHUT_RDWR)
            else:
                theirs.sendall(hello[-32:] if answer == "reflection" else os.urandom(32))
        with pytest.raises((HandshakeError, TimeoutError)):
            call.result()
        assert time.monotonic() - began < 10.0


def test_only_the_chosen_interface_listens(monkeypatch):
    with Listener(own_addresses(), 1) as local:
        assert {address for address, _ in local.endpoints} <= {"127.0.0.1", "::1"}
        bound = [listening.getsockname()[0] for listening in local._sockets]
        assert bound == [address for address, _ in local.endpoints]
    # All processes on one node: loopback is enough.
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert own_addresses() == ["127.0.0.1"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert set(own_addresses()) >= {"127.0.0.1"}


def test_no_address_to_listen_at_is_an_error_that_names_the_remedy():
    with pytest.raises(OSError, match=r"192\.0\.2\.1: .*GLOO_SOCKET_IFNAME names"):
        Listener(["192.0.2.1"], 1)
