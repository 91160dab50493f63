"""Connections between learners with certificates of an authority of our own."""

import json
import shutil
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from effasr import config as configuration
from effasr.distributed.async_sgd.gossip import sockets
from effasr.distributed.async_sgd.gossip.config import GossipConfig
from effasr.distributed.async_sgd.gossip.sockets import PeerLost, SocketTransport
from effasr.distributed.async_sgd.gossip.tls import TLSConfig, client_context
from effasr.distributed.async_sgd.learners import Learners
from effasr.distributed.async_sgd.weight_averaging import WeightAveraging
from effasr.distributed.process_group import DistributedContext

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the openssl command to sign certificates"
)


def authority(folder: Path) -> TLSConfig:
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


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def pair(first: TLSConfig | None, second: TLSConfig | None, timeout_s: float = 20.0):
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(SocketTransport, store, 1, [0], timeout_s, second)
        active = SocketTransport(store, 0, [1], timeout_s, first)
        return active, listening.result()


def test_what_is_sent_arrives_encrypted_in_both_directions(ours):
    active, passive = pair(ours, ours)
    for connection in (active._connections[1], passive._connections[0]):
        assert connection.version() == "TLSv1.3"
        assert connection.getpeercert()["subject"] == ((("commonName", "node"),),)
    sent, got = torch.arange(3_000_000.0), torch.zeros(3_000_000)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(active.send, sent, 1, 20.0)
        passive.receive(got, 0, 20.0)
        sending.result()
        assert torch.equal(got, sent)
        sending = pool.submit(passive.send, got, 0, 20.0)
        active.receive(sent.zero_(), 1, 20.0)
        sending.result()
        assert torch.equal(got, sent)
        # What waits ends when this learner closes its connections.
        waiting = pool.submit(passive.receive, got, 0, 60.0)
        time.sleep(0.05)
        passive.close()
        assert "of this learner were closed" in str(waiting.exception(timeout=5.0))
    with pytest.raises(PeerLost):
        active.receive(got, 1, 5.0)


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


@pytest.mark.parametrize("encrypted", [False, True])
def test_only_with_tls_weights_cannot_be_read_on_the_way(ours, encrypted):
    """A relay between the two reads everything."""
    seen, store = bytearray(), HashStore()
    tls = ours if encrypted else None
    with ThreadPoolExecutor(4) as pool, socket.create_server(("127.0.0.1", 0)) as relay:
        listening = pool.submit(SocketTransport, store, 1, [0], 20.0, tls)
        while not store.check(["listening/1"]):
            time.sleep(0.01)
        where = json.loads(store.get("listening/1"))
        endpoint = tuple(where["endpoints"][0])
        store.set("listening/1", json.dumps(where | {"endpoints": [relay.getsockname()]}))

        def copy(source: socket.socket, target: socket.socket):
            while data := source.recv(1 << 16):
                seen.extend(data)
                target.sendall(data)

        def start() -> tuple[socket.socket, socket.socket]:
            client, _ = relay.accept()
            server = socket.create_connection(endpoint)
            pool.submit(copy, client, server)
            pool.submit(copy, server, client)
            return client, server

        starting = pool.submit(start)
        active = SocketTransport(store, 0, [1], 20.0, tls)
        ends = starting.result()
        active.send(torch.full((1000,), 1.25), 1, 5.0)
        listening.result().receive(torch.zeros(1000), 0, 5.0)
        for end in ends:
            end.shutdown(socket.SHUT_RDWR)
            end.close()
    plain = bytes(torch.full((1000,), 1.25).numpy().data)
    assert (plain in seen) == (not encrypted)
    assert bytes.fromhex(where["key"]) not in seen


def test_foreign_certificates_and_plain_connections_are_refused(ours, foreign, monkeypatch):
    monkeypatch.setattr(sockets, "_WELCOME_S", 1.0)
    crossed = replace(ours, certificate=foreign.certificate, key=foreign.key)
    for other, reason in ((foreign, "CERTIFICATE_VERIFY_FAILED"), (crossed, ""), (None, "")):
        active, passive = pair(other, ours, timeout_s=2.0)
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
            client_context(replace(ours, **changed))


def test_a_recipe_names_the_files():
    mapping = {"tls": {"ca": "ca.pem", "certificate": "node.pem", "key": "node.key"}}
    config = configuration.from_mapping(GossipConfig, mapping)
    assert config.tls == TLSConfig(ca="ca.pem", certificate="node.pem", key="node.key")
    assert configuration.from_mapping(GossipConfig, {"tls": None}).tls is None
    with pytest.raises(ValueError, match="must be the path of a PEM file, but is empty"):
        configuration.from_mapping(GossipConfig, {"tls": mapping["tls"] | {"key": ""}})
