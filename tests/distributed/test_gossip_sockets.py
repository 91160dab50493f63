"""Connections between learners, here between threads: what is lost is noticed, at once."""

import json
import os
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch.distributed import HashStore

from effasr.distributed.async_sgd.gossip import sockets
from effasr.distributed.async_sgd.gossip.listener import own_addresses
from effasr.distributed.async_sgd.gossip.sockets import PeerLost, SocketTransport

MUCH = 10_000_000  # More numbers than the buffers of a connection hold


@contextmanager
def threads():
    pool = ThreadPoolExecutor(8)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True)


def connect(*learners: int, timeout_s: float = 20.0) -> list[SocketTransport]:
    """Learners, each with all of the other kind as neighbours."""
    store = HashStore()
    with threads() as pool:
        made = [
            pool.submit(SocketTransport, store, n, [o for o in learners if (o - n) % 2], timeout_s)
            for n in learners
        ]
        return [future.result() for future in made]


def error_of(call: Future, within_s: float = 5.0) -> str:
    error = call.exception(timeout=within_s)
    assert isinstance(error, PeerLost), error
    return str(error)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("numel", [0, 1, 2, MUCH])
def test_what_is_sent_arrives(dtype, numel):
    active, passive = connect(0, 1)
    sent = torch.arange(numel).to(dtype)
    got = torch.zeros(numel, dtype=dtype)
    with threads() as pool:
        calls = pool.submit(active.send, sent, 1, 20.0), pool.submit(passive.receive, got, 0, 20.0)
        for call in calls:
            call.result()
        assert torch.equal(got, sent)
        back = pool.submit(passive.send, got, 0, 20.0)
        active.receive(sent.zero_(), 1, 20.0)
        back.result()
    assert torch.equal(sent, got)


def test_many_neighbours_at_once():
    party = connect(0, 1, 2, 3, 4)
    got = {(a, p): torch.zeros(1000) for a in (0, 2, 4) for p in (1, 3)}
    with threads() as pool:
        calls = []
        for (active, passive), tensor in got.items():
            number = torch.full((1000,), 10.0 * active + passive)
            calls.append(pool.submit(party[active].send, number, passive, 20.0))
            calls.append(pool.submit(party[passive].receive, tensor, active, 20.0))
        for call in calls:
            call.result()
    assert all((tensor == 10.0 * a + p).all() for (a, p), tensor in got.items())


def test_a_neighbour_that_ends_in_the_midst_of_a_message_is_lost_at_once():
    active, passive = connect(0, 1)
    with threads() as pool:
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
    with threads() as pool:
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

    with threads() as pool:
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


def test_connections_end_with_their_transport():
    active, passive = connect(0, 1)
    del active
    with pytest.raises(PeerLost, match="closed by the other side"):
        passive.receive(torch.zeros(1), 0, 5.0)


def test_addresses_are_those_of_the_interfaces_that_are_named(monkeypatch):
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
