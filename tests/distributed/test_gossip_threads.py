"""Learners in threads of one process, over a network in memory that may be slow, cut or deaf."""

import logging
import math
import random
import threading
import time

import pytest
import torch

from effasr.distributed.async_sgd.gossip.config import GossipConfig
from effasr.distributed.async_sgd.gossip.gossip import Gossip
from effasr.distributed.averager import add_flat
from tests.distributed.gossip_reference import MemoryNetwork


class Fleet:
    """Learners that share a network; learner n has weights of n at first."""

    def __init__(self, learners: int, *, delay_s: float = 0.0, numel: int = 4, **config):
        self.network = MemoryNetwork(delay_s)
        self.weights = [[torch.full((numel,), float(n))] for n in range(learners)]
        self.lost: list[list[int]] = [[] for _ in range(learners)]
        self.gossips = [
            Gossip(
                self.weights[n],
                learner=n,
                learners=learners,
                transport=self.network.at(n),
                config=GossipConfig(**config),
                on_lost=self.lost[n].append,
            )
            for n in range(learners)
        ]

    def step(self, n: int, by: float = 0.0):
        self.take(n)
        self.weights[n][0] += by
        self.gossips[n].publish()

    def take(self, n: int):
        delta = self.gossips[n].take()
        if delta is not None:
            add_flat(self.weights[n], delta)

    def run(self, train, who=None):
        """Each learner calls ``train(n)`` in a thread of its own; an error is raised here."""
        errors = []

        def guarded(n: int):
            try:
                train(n)
            except Exception as error:
                errors.append(error)

        who = range(len(self.gossips)) if who is None else who
        threads = [threading.Thread(target=guarded, args=(n,), daemon=True) for n in who]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a learner hangs"
        if errors:
            raise errors[0]

    def train(self, steps, by: float = 0.0, pause=lambda n: 0.0):
        """What `run` takes: ``steps(n)`` updates by ``by``, then a drain and what is left."""

        def body(n: int):
            self.gossips[n].start()
            for _ in range(steps(n)):
                self.step(n, by)
                time.sleep(pause(n))
            self.gossips[n].drain()
            self.take(n)
            assert self.gossips[n].take() is None

        return body

    def sum(self) -> float:
        return sum(weights[0].double().mean().item() for weights in self.weights)

    def spread(self) -> float:
        rows = torch.stack([weights[0] for weights in self.weights])
        return (rows - rows.mean(0)).square().sum(1).mean().item()


def until(condition, limit_s: float = 10.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.001)


@pytest.mark.parametrize("topology", ["ring", "random"])
@pytest.mark.parametrize("learners", [2, 3, 5, 8])
def test_without_updates_all_arrive_at_the_mean(topology, learners):
    fleet = Fleet(learners, topology=topology)
    fleet.run(fleet.train(lambda n: 150, pause=lambda n: 0.002))
    assert fleet.sum() == pytest.approx(learners * (learners - 1) / 2, rel=1e-6)
    assert fleet.spread() < 1e-4
    assert fleet.network.idle()


@pytest.mark.parametrize("topology", ["ring", "random"])
@pytest.mark.parametrize("period", [1, 3])
def test_no_update_is_lost_in_a_stress_of_random_pauses(topology, period):
    fleet = Fleet(5, delay_s=0.003, numel=300_000, topology=topology, period=period)
    steps = lambda n: 60 + 15 * n
    start = fleet.sum()

    def pause(n: int) -> float:
        # On a slow machine a learner must not end before it has exchanged.
        is_slow = fleet.gossips[n].counters().exchanges <= 3
        return 0.02 if is_slow else random.uniform(0, 0.002 * (n + 1))

    fleet.run(fleet.train(steps, 1.0, pause))
    assert fleet.sum() == pytest.approx(start + sum(map(steps, range(5))), rel=1e-6)
    counters = [gossip.counters() for gossip in fleet.gossips]
    assert all(c.exchanges > 3 for c in counters)
    assert all(c.applied == c.exchanges for c in counters)
    assert sum(c.exchanges for c in counters[::2]) == sum(c.exchanges for c in counters[1::2])
    assert all(c.bytes == c.exchanges * 2 * 4 * 300_000 for c in counters)
    assert all(0 <= c.staleness_mean <= c.staleness_max for c in counters)
    assert [c.updates for c in counters] == list(map(steps, range(5)))
    if period == 3:
        assert all(counters[n].exchanges <= steps(n) // 3 for n in (0, 2, 4))


def test_a_slow_learner_does_not_hold_up_the_others():
    """It computes one step until all others have made thirty, and answers them all the while."""
    fleet = Fleet(4)
    finished = [threading.Event() for _ in range(4)]

    def body(n: int):
        fleet.gossips[n].start()
        if n == 1:
            fleet.step(n, 1.0)
            assert all(finished[other].wait(15) for other in (0, 2, 3)), "it holds others up"
            assert fleet.gossips[n].counters().exchanges > 10
            fleet.step(n, 1.0)
        else:
            for _ in range(30):
                fleet.step(n, 1.0)
                time.sleep(0.01)
            finished[n].set()
        fleet.gossips[n].drain()
        fleet.take(n)

    fleet.run(body)
    assert fleet.sum() == pytest.approx(6 + 2 + 3 * 30)
    assert fleet.gossips[1].counters().staleness_max <= 2


def test_drained_learners_begin_anew_and_nothing_is_taken_twice():
    fleet = Fleet(3, delay_s=0.001)
    expected = fleet.sum()
    for cycle in range(4):
        steps = [10 + 5 * ((n + cycle) % 3) for n in range(3)]
        fleet.run(fleet.train(steps.__getitem__, 1.0))
        assert fleet.network.idle()
        expected += 10 + 15 + 20
        assert fleet.sum() == pytest.approx(expected, rel=1e-6)


def test_what_is_not_taken_at_a_drain_is_kept_for_later():
    fleet = Fleet(2)
    for gossip in fleet.gossips:
        gossip.start()
    fleet.gossips[0].publish()
    until(lambda: fleet.gossips[0].counters().exchanges)
    fleet.run(lambda n: fleet.gossips[n].drain())
    for gossip in fleet.gossips:
        gossip.start()
    for n in (0, 1):
        fleet.take(n)
    assert [weights[0][0].item() for weights in fleet.weights] == [0.5, 0.5]
    fleet.run(lambda n: fleet.gossips[n].drain())


@pytest.mark.parametrize("dead", [1, 2])
@pytest.mark.parametrize("topology", ["ring", "random"])
def test_survivors_go_on_without_one_that_dies(dead, topology, caplog):
    fleet = Fleet(5, topology=topology)
    alive = [n for n in range(5) if n != dead]

    def body(n: int):
        fleet.gossips[n].start()
        for step in range(60):
            fleet.step(n)
            if step == 20 and n == dead:
                fleet.network.dead.add(dead)
                return
            time.sleep(0.003)
        fleet.gossips[n].drain()
        fleet.take(n)

    with caplog.at_level(logging.WARNING):
        fleet.run(body)
    for n in alive:
        near = topology == "random" and n % 2 != dead % 2
        if near or (topology == "ring" and abs(n - dead) == 1):
            assert fleet.lost[n] == [dead]
            assert fleet.gossips[n].counters().lost == (dead,)
            assert f"learner {n} lost learner {dead}, and " in caplog.text
        else:
            assert fleet.lost[n] == []


def test_a_learner_whose_only_neighbour_died_goes_on_alone(caplog):
    fleet = Fleet(2)
    fleet.gossips[0].start()
    fleet.network.dead.add(1)
    for _ in range(3):
        fleet.step(0, 1.0)
        time.sleep(0.01)
    fleet.gossips[0].drain()
    assert fleet.weights[0][0][0].item() == 3.0
    assert "has no other: continues alone: Connection closed by peer" in caplog.text


@pytest.mark.parametrize("silent", [0, 1])
def test_one_that_falls_silent_is_left_out_in_time(silent):
    """A cut network closes no connection."""
    fleet = Fleet(4, timeout_s=0.5)
    alive = [n for n in range(4) if n != silent]
    beside = [n for n in alive if (n - silent) % 2]
    for gossip in fleet.gossips:
        gossip.start()
    for n in range(4):
        fleet.step(n)
    until(lambda: fleet.gossips[2].counters().exchanges)
    fleet.network.cut.add(silent)

    satisfied = set()

    def body(n: int):
        exchanges = None
        # All go on until each neighbour has noticed, and has had ten exchanges since.
        while not satisfied.issuperset(beside):
            fleet.step(n, 1.0)
            time.sleep(0.005)
            now = fleet.gossips[n].counters().exchanges
            if fleet.lost[n] and exchanges is None:
                exchanges = now
            if exchanges is not None and now >= exchanges + 10:
                satisfied.add(n)
        fleet.gossips[n].drain()
        fleet.take(n)

    fleet.run(body, alive)
    assert all(fleet.lost[n] == [silent] for n in beside)
    assert all(fleet.lost[n] == [] for n in alive if n not in beside)


def test_one_that_computes_for_long_is_not_silent():
    # No stall of a loaded machine is as long.
    fleet = Fleet(2, timeout_s=0.6)

    def body(n: int):
        fleet.gossips[n].start()
        for _ in range(100):
            if n == 1:
                fleet.step(n)
            time.sleep(0.03)
        if n == 0:
            fleet.step(n)
            until(lambda: fleet.gossips[0].counters().exchanges)
        fleet.gossips[n].drain()

    fleet.run(body)
    assert fleet.lost == [[], []]


def test_one_that_is_not_chosen_for_long_still_hears_of_the_busy(monkeypatch):
    """As happens among hundreds, of which each exchange is with one."""
    # No stall of a loaded machine is as long.
    fleet = Fleet(4, topology="random", timeout_s=0.6)
    for active in (0, 2):
        monkeypatch.setattr(fleet.gossips[active]._side, "_choose", lambda living, count: 1)

    def body(n: int):
        fleet.gossips[n].start()
        # Longer than a passive one is patient.
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            fleet.step(n)
            time.sleep(0.002)
        fleet.gossips[n].drain()

    fleet.run(body)
    assert fleet.gossips[0].counters().exchanges > 20
    assert fleet.gossips[3].counters().exchanges == 0
    assert fleet.lost == [[], [], [], []]


def pair_of(network, n, weights, **options):
    return Gossip(
        [weights], learner=n, learners=2, transport=network.at(n), config=GossipConfig(), **options
    )


def test_an_error_of_a_thread_reaches_the_one_that_trains():
    network = MemoryNetwork()
    gossips = [pair_of(network, n, torch.zeros(3 + n)) for n in (0, 1)]
    for gossip in gossips:
        gossip.start()
    gossips[0].publish()
    until(lambda: gossips[1]._peers._error is not None)
    for call in (gossips[1].publish, gossips[1].take, gossips[1].drain):
        with pytest.raises(
            RuntimeError,
            match="exchange of learner 1 with learner 0 failed: ValueError: learner 1 averages 4 "
            "numbers, but learner 0 3: start all learners with the same model",
        ):
            call()
    network.dead.add(1)
    gossips[0].drain()


def test_an_error_of_the_callback_reaches_the_one_that_trains():
    network = MemoryNetwork()
    network.dead.add(1)

    def on_lost(peer: int):
        raise OSError(f"no disk to note {peer} on")

    gossip = pair_of(network, 0, torch.zeros(3), on_lost=on_lost)
    gossip.start()
    gossip.publish()
    until(lambda: gossip._peers._error is not None)
    with pytest.raises(RuntimeError, match="learner 1 failed: OSError: no disk to note 1 on"):
        gossip.drain()


def test_calls_out_of_order_are_refused():
    fleet = Fleet(2)
    with pytest.raises(RuntimeError, match="`start` must be called before"):
        fleet.gossips[0].publish()
    with pytest.raises(RuntimeError, match="`start` must be called before"):
        fleet.gossips[0].drain()
    assert fleet.gossips[0].take() is None
    assert math.isnan(fleet.gossips[0].counters().staleness_mean)
    fleet.gossips[0].start()
    with pytest.raises(RuntimeError, match="`start` must not be called between"):
        fleet.gossips[0].start()
    fleet.gossips[1].start()
    fleet.run(lambda n: fleet.gossips[n].drain())
