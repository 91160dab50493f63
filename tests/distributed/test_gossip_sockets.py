"""Connections between learners, here between threads: what is lost is noticed, at once.

Hostile clients come to the ports of learners, and hostile servers stand in their place.
"""

import json
import os
import resource
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from effasr.distributed.async_sgd.gossip import sockets
from effasr.distributed.async_sgd.gossip.config import GossipConfig, TLSConfig, tls_context
from effasr.distributed.async_sgd.gossip.gossip import Gossip
from effasr.distributed.async_sgd.gossip.sockets import (
    HELLO_BYTES,
    KEY_BYTES,
    HandshakeError,
    Listener,
    PeerLost,
    SocketTransport,
    introduce,
    own_addresses,
    verify,
)
from effasr.distributed.async_sgd.learners import Learners
from effasr.distributed.async_sgd.weight_averaging import WeightAveraging
from effasr.distributed.process_group import DistributedContext
from tests.distributed.gossip_reference import connect

MUCH = 10_000_000  # More numbers than the buffers of a connection hold


def talk(active: SocketTransport, passive: SocketTransport, sent: torch.Tensor, times: int = 1):
    """Learners 0 and 1 send each other the same."""
    with ThreadPoolExecutor(1) as pool:
        for _ in range(times):
            got, back = torch.zeros_like(sent), torch.zeros_like(sent)
            sending = pool.submit(active.send, sent, 1, 20.0)
            passive.receive(got, 0, 20.0)
            sending.result()
            assert torch.equal(got, sent)
            sending = pool.submit(passive.send, got, 0, 20.0)
            active.receive(back, 1, 20.0)
            sending.result()
            assert torch.equal(back, sent)


def error_of(call: Future, within_s: float = 5.0) -> str:
    error = call.exception(timeout=within_s)
    assert isinstance(error, PeerLost), error
    return str(error)


def test_a_neighbour_that_ends_in_the_midst_of_a_message_is_lost_at_once():
    active, passive = connect(0, 1)
    with ThreadPoolExecutor(8) as pool:
        receiving = pool.submit(passive.receive, torch.zeros(MUCH), 0, 60.0)
        active.send(torch.zeros(1000), 1, 20.0)
        time.sleep(0.05)
        assert not receiving.done()
        # As the kernel does for a process that is killed.
        active._connections[1].close()
        assert error_of(receiving) == "the connection was closed by the other side"
    with pytest.raises(PeerLost):
        passive.send(torch.zeros(MUCH), 0, 20.0)


def test_closing_ends_every_call_that_waits():
    first, passive, second = connect(0, 1, 2)
    with ThreadPoolExecutor(8) as pool:
        sending = pool.submit(passive.send, torch.zeros(MUCH), 0, 60.0)
        receiving = pool.submit(passive.receive, torch.zeros(1), 2, 60.0)
        time.sleep(0.05)
        began = time.monotonic()
        passive.close()
        assert (
            error_of(sending)
            == error_of(receiving)
            == ("the connections of this learner were closed")
        )
        assert time.monotonic() - began < 30.0
        with pytest.raises(PeerLost, match="of this learner were closed"):
            passive.send(torch.zeros(1), 0, 1.0)
    # The neighbours come to know it.
    for other in (first, second):
        with pytest.raises(PeerLost, match="closed by the other side"):
            other.receive(torch.zeros(MUCH), 1, 20.0)


def test_one_that_is_silent_is_lost_in_time_and_one_that_is_slow_is_not():
    active, passive = connect(0, 1)
    got = torch.zeros(6)

    def slowly():
        for number in range(6):
            time.sleep(0.2)
            active.send(torch.tensor([float(number)]), 1, 20.0)

    with ThreadPoolExecutor(8) as pool:
        sending = pool.submit(slowly)
        passive.receive(got, 0, 0.6)
        sending.result()
    assert got.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(PeerLost, match=r"^it has been silent for 0\.1 s$"):
        passive.receive(got, 0, 0.1)
    with pytest.raises(PeerLost, match=r"^it has been silent for 0\.1 s$"):
        active.send(torch.zeros(MUCH), 1, 0.1)


@pytest.mark.parametrize("learner", [0, 1])
def test_one_that_does_not_come_is_lost_at_the_first_message(learner):
    transport = SocketTransport(HashStore(), learner, [1 - learner], 0.2)
    with pytest.raises(PeerLost, match="it did not connect"):
        transport.send(torch.zeros(1), 1 - learner, 1.0)


def test_the_next_address_is_tried_and_all_are_named_where_none_leads_there(monkeypatch):
    monkeypatch.setattr(sockets, "_CONNECT_S", 0.3)
    monkeypatch.setattr(sockets, "_WELCOME_S", 0.3)
    with socket.create_server(("127.0.0.2", 0)) as foreign:
        port = foreign.getsockname()[1]
        store = HashStore()
        endpoints = [["127.0.0.3", port], ["127.0.0.2", port]]
        where = {"endpoints": endpoints, "key": "00" * 32}
        store.set("listening/1", json.dumps(where))
        active = SocketTransport(store, 0, [1], 5.0)
        with pytest.raises(PeerLost, match=r"127\.0\.0\.3: .*refused.*GLOO_SOCKET_IFNAME names"):
            active.send(torch.zeros(1), 1, 1.0)
    monkeypatch.setattr(sockets, "own_addresses", lambda: ["127.0.0.3", "::1", "127.0.0.1"])
    # A listener of IPv4 and IPv6 hears at each of them.
    connect(0, 1)


def test_a_forked_child_keeps_no_connection_open():
    active, passive = connect(0, 1)
    child = os.fork()
    if not child:
        signal.pause()
    try:
        active._connections[1].close()
        with pytest.raises(PeerLost, match="closed by the other side"):
            passive.receive(torch.zeros(1), 0, 5.0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_addresses_are_those_of_the_interfaces_that_are_named(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    result = own_addresses()
    assert result
    assert "127.0.0.1" in result
    if len(result) > 1 and not result[0].startswith("127."):
        assert result.index("127.0.0.1") > 0
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_addresses()[0] == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo, nonexistent0")
    with pytest.raises(ValueError, match=r"'nonexistent0' has none here: choose of .*lo"):
        own_addresses()


def authority(folder: Path) -> TLSConfig:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to sign certificates")
    folder.mkdir()

    def openssl(*arguments: str):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ours")
    openssl("req", *curve, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
    openssl("x509", "-req", "-in", "node.csr", *signed, "-out", "node.pem")
    paths = (str(folder / name) for name in ("ca.pem", "node.pem", "node.key"))
    return TLSConfig(**dict(zip(("ca", "certificate", "key"), paths, strict=True)))


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> TLSConfig:
    return authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> TLSConfig:
    return authority(tmp_path_factory.mktemp("tls") / "foreign")


def test_what_is_sent_arrives_encrypted_in_both_directions(ours):
    active, passive = connect(0, 1, tls=(ours, ours))
    for connection in (active._connections[1], passive._connections[0]):
        assert connection.version() == "TLSv1.3"
        assert connection.getpeercert()["subject"] == ((("commonName", "node"),),)
    talk(active, passive, torch.arange(3_000_000.0))
    with ThreadPoolExecutor(1) as pool:
        # What waits ends when this learner closes its connections.
        waiting = pool.submit(passive.receive, torch.zeros(1), 0, 60.0)
        time.sleep(0.05)
        passive.close()
        assert "of this learner were closed" in str(waiting.exception(timeout=5.0))
    with pytest.raises(PeerLost):
        active.receive(torch.zeros(1), 1, 5.0)


def test_the_averaging_of_weights_uses_the_certificates_of_its_settings(ours):
    store, config = HashStore(), GossipConfig(tls=ours, timeout_s=20.0)

    def connect(rank: int) -> WeightAveraging:
        model = nn.Linear(2, 2)
        context = DistributedContext(rank, 2, torch.device("cpu"), store=store)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return WeightAveraging(model, optimizer, Learners(context, 1, config), config, seed=0)

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(connect, range(2)))
    for rank, averaging in enumerate(both):
        connection = averaging._gossip._transport._connections[1 - rank]
        assert connection.version() == "TLSv1.3"
        averaging.abandon()
        connection.close()


def test_foreign_certificates_and_plain_connections_are_refused(ours, foreign, monkeypatch):
    monkeypatch.setattr(sockets, "_WELCOME_S", 1.0)
    crossed = replace(ours, certificate=foreign.certificate, key=foreign.key)
    for other, reason in ((foreign, "CERTIFICATE_VERIFY_FAILED"), (crossed, ""), (None, "")):
        active, passive = connect(0, 1, timeout_s=2.0, tls=(other, ours))
        with pytest.raises(PeerLost, match=rf"cannot be reached.*{reason}"):
            active.send(torch.zeros(1), 1, 1.0)
        with pytest.raises(PeerLost, match="did not connect"):
            passive.receive(torch.zeros(1), 0, 1.0)
        assert passive.rejected_connections >= 1


def test_files_that_are_not_what_they_should_be_are_named(ours, foreign, tmp_path):
    empty = tmp_path / "empty.pem"
    empty.touch()
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", ours.key, "-aes256", "-passout", "pass:word"]
    subprocess.run([*command, "-out", str(locked)], check=True, capture_output=True)
    for changed, message in (
        ({"ca": str(tmp_path / "none")}, r"`training\.gossip\.tls\.ca` must be a readable .*none"),
        ({"ca": str(empty)}, r"`training\.gossip\.tls\.ca` must hold .*empty\.pem"),
        ({"certificate": str(empty)}, r"certificate and its private key.*empty\.pem"),
        ({"key": foreign.key}, r"certificate and its private key.*KEY_VALUES_MISMATCH"),
        ({"key": str(locked)}, r"certificate and its private key.*the key is encrypted"),
    ):
        with pytest.raises(ValueError, match=message):
            tls_context(replace(ours, **changed), ssl.PROTOCOL_TLS_CLIENT)


Attack = Callable[[socket.socket, threading.Event], None]


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def endpoint_of(store: HashStore, learner: int = 1) -> tuple[str, int]:
    while not store.check([f"listening/{learner}"]):
        time.sleep(0.01)
    address, port = json.loads(store.get(f"listening/{learner}"))["endpoints"][0]
    return address, port


def garbage(client: socket.socket, stop: threading.Event):
    client.sendall(os.urandom(secrets.choice((1, 87, 88, 89, 5000))))
    client.recv(1000)


def slow_drip(client: socket.socket, stop: threading.Event):
    while not stop.wait(0.05):
        client.sendall(b"e")


def silence(client: socket.socket, stop: threading.Event):
    stop.wait()


def huge_length(client: socket.socket, stop: threading.Event):
    """As an exchange of 2 ** 62 numbers, without a handshake."""
    client.sendall(torch.tensor([1, 2**62]).numpy().tobytes())
    while not stop.is_set():
        client.sendall(bytes(1 << 16))


def echo(client: socket.socket, stop: threading.Event):
    while not stop.is_set():
        client.sendall(client.recv(1000))


@contextmanager
def under(attack: Attack, endpoint: tuple[str, int], clients: int) -> Iterator[None]:
    stop = threading.Event()

    def connect_again_and_again():
        while not stop.wait(0.01):
            with suppress(OSError), socket.create_connection(endpoint, 1.0) as client:
                client.settimeout(0.5)
                attack(client, stop)

    with ThreadPoolExecutor(clients) as pool:
        for _ in range(clients):
            pool.submit(connect_again_and_again)
        time.sleep(0.2)
        try:
            yield
        finally:
            stop.set()


@pytest.mark.parametrize("attack", [garbage, slow_drip, silence, huge_length, echo])
def test_two_learners_connect_and_exchange_under_attack(attack, monkeypatch, caplog):
    monkeypatch.setattr(sockets, "HANDSHAKE_S", 1.0)
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(SocketTransport, store, 1, [0], 30.0)
        with under(attack, endpoint_of(store), clients=8):
            began = time.monotonic()
            active = SocketTransport(store, 0, [1], 30.0)
            passive = listening.result()
            assert time.monotonic() - began < 15.0
            talk(active, passive, torch.arange(10_000.0), times=20)
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


@pytest.mark.parametrize("is_last_late", [True, False])
def test_of_two_connections_of_a_learner_the_last_is_kept(is_last_late, monkeypatch):
    """In whatever order their handshakes end; the listener waits for learner 2 as well."""
    reply, has_begun, may_end = Listener._reply, threading.Event(), threading.Event()

    def in_order(self, connection, content):
        # The first hello is that of the attempt that is to end last.
        if not has_begun.is_set():
            has_begun.set()
            may_end.wait(20.0)
        return reply(self, connection, content)

    monkeypatch.setattr(Listener, "_reply", in_order)
    with Listener(["127.0.0.1"], 1) as local, ThreadPoolExecutor(3) as pool:
        accepting = pool.submit(local.accept, {0, 2}, time.monotonic() + 20.0)

        def meet(peer: int, attempt: int) -> socket.socket:
            client = socket.create_connection(local.endpoints[0], 5.0)
            whom = {"connecting": peer, "listening": 1, "attempt": attempt}
            return introduce(client, local.key, until=time.monotonic() + 20.0, **whom)

        order = (1, 0) if is_last_late else (0, 1)
        late = pool.submit(meet, 0, order[0])
        assert has_begun.wait(20.0)
        early = meet(0, order[1])
        may_end.set()
        clients = dict(zip(order, (late.result(), early), strict=True))
        assert clients[0].recv(1) == b""
        other = meet(2, 0)
        result = accepting.result()
        with clients[0], clients[1], other, result[0], result[2]:
            result[0].sendall(b"x")
            assert clients[1].recv(1) == b"x"


def test_what_was_recorded_cannot_be_replayed():
    """The listener waits for learner 2 as well."""
    with Listener(["127.0.0.1"], 1) as local, ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(local.accept, {0, 2}, time.monotonic() + 2.0)
        first, again = (socket.create_connection(local.endpoints[0], 5.0) for _ in range(2))
        with first, again:
            recorded = hello_to(first.recv(32), local.key)
            # The key was not on the wire.
            assert local.key not in recorded
            assert len(again.recv(32)) == 32
            for client, size in ((first, 32), (again, 0)):
                client.sendall(recorded)
                assert len(client.recv(100)) == size
        result = accepting.result()
    assert list(result) == [0]
    result[0].close()
    assert local.rejected_connections == 1


def test_a_proof_is_valid_for_one_role_one_connection_and_one_learner():
    key, nonce = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(32)
    hello = hello_to(nonce, key)
    peer, attempt, reply = verify(hello, nonce, key, 1)
    assert attempt == 0
    assert peer == 0
    changed = [hello[:n] + bytes([hello[n] ^ 1]) + hello[n + 1 :] for n in range(8, HELLO_BYTES)]
    for bad, to, learner in (
        (hello, secrets.token_bytes(32), 1),
        (hello[:-32] + reply, nonce, 1),
        (hello_to(nonce, secrets.token_bytes(KEY_BYTES)), nonce, 1),
        *((other, nonce, 1) for other in changed[16:]),
    ):
        with pytest.raises(HandshakeError, match="does not have the key"):
            verify(bad, to, key, learner)
    for bad, learner in ((hello, 3), *((other, 1) for other in changed[8:16])):
        with pytest.raises(HandshakeError, match="looks for another learner"):
            verify(bad, nonce, key, learner)


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


def test_handshakes_have_limits_and_a_neighbour_may_connect_again(monkeypatch, caplog):
    monkeypatch.setattr(sockets, "HANDSHAKE_S", 2.0)
    monkeypatch.setattr(sockets, "_PENDING", 2)
    caplog.set_level("DEBUG", sockets.__name__)
    with Listener(["127.0.0.1"], 1) as local, ThreadPoolExecutor(1) as pool, ExitStack() as clients:
        accepting = pool.submit(local.accept, {0, 2}, time.monotonic() + 30.0)

        def connected() -> socket.socket:
            return clients.enter_context(socket.create_connection(local.endpoints[0], 20.0))

        def introduced(number: int) -> socket.socket:
            until = time.monotonic() + 20.0
            return introduce(connected(), local.key, connecting=number, listening=1, until=until)

        for client in [connected() for _ in range(3)]:
            assert len(client.recv(32)) == 32
            assert client.recv(1) == b""
        with pytest.raises(HandshakeError, match="closed the connection"):
            introduced(4)
        first = introduced(0)
        while 0 not in local._connected:  # the listener is told by a thread
            time.sleep(0.01)
        introduced(0)
        assert first.recv(1) == b""
        introduced(2)
        for connection in accepting.result().values():
            connection.close()
    dropped = [text for text in caplog.messages if "dropped a connection" in text]
    silent, stranger = ["it was silent"] * 2, "learner 4 is not a neighbour"
    reasons = sorted(text.rpartition(": ")[2] for text in dropped)
    assert reasons == [*silent, stranger, "too many came"]
    assert local.rejected_connections == 4


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
