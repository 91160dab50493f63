"""Learners in threads of one process, over connections that may be slow, cut or deaf."""

import math
import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from effasr.distributed.async_sgd.gossip.config import GossipConfig, neighbours
from effasr.distributed.async_sgd.gossip.gossip import Gossip
from effasr.distributed.async_sgd.gossip.sockets import SocketTransport
from effasr.distributed.async_sgd.weight_averaging import consensus_distance
from effasr.distributed.averager import add_flat
from effasr.distributed.process_group import DistributedContext
from tests.distributed.gossip_reference import connect
from tests.support.run_ranks import check_ranks


class Fleet:
    """Learners that are connected; learner n has weights of n at first."""

    def __init__(self, learners: int, *, delay_s: float = 0.0, numel: int = 4, **config):
        self.transports = connect(*range(learners))
        for transport in self.transports if delay_s else ():
            delay(transport, lambda: random.uniform(0, delay_s))
        self.weights = [[torch.full((numel,), float(n))] for n in range(learners)]
        self.lost: list[list[int]] = [[] for _ in range(learners)]
        self.gossips = [
            Gossip(
                self.weights[n],
                learner=n,
                learners=learners,
                transport=self.transports[n],
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


def delay(transport: SocketTransport, seconds: Callable[[], float]):
    """Let a learner wait before it sends or receives."""
    for name in ("send", "receive"):
        call = getattr(transport, name)

        def late(*arguments, call=call):
            time.sleep(seconds())
            call(*arguments)

        setattr(transport, name, late)


def until(condition, limit_s: float = 10.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.001)


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


def test_a_learner_whose_only_neighbour_died_goes_on_alone(caplog):
    fleet = Fleet(2)
    fleet.gossips[0].start()
    fleet.transports[1].close()
    for _ in range(3):
        fleet.step(0, 1.0)
        time.sleep(0.01)
    fleet.gossips[0].drain()
    assert fleet.weights[0][0][0].item() == 3.0
    assert "has no other: continues alone: " in caplog.text


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
    delay(fleet.transports[silent], lambda: 60.0)

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


def one_of_two(learner: int, transport: SocketTransport, **options) -> Gossip:
    """Whose weights are more for learner 1."""
    weights = [torch.zeros(3 + learner)]
    return Gossip(
        weights, learner=learner, learners=2, transport=transport, config=GossipConfig(), **options
    )


def test_an_error_of_a_thread_reaches_the_one_that_trains():
    transports = connect(0, 1)
    gossips = [one_of_two(n, transport) for n, transport in enumerate(transports)]
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
    transports[1].close()
    gossips[0].drain()


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


class Party:
    """The first so many processes: a group for their exchanges, another for what is collective."""

    def __init__(self, context: DistributedContext, number: int, size: int):
        self.rank, self.size = context.rank, size
        assert context.store is not None
        self.store = PrefixStore(f"party/{number}", context.store)
        # Those that had no part in what was before have been here for long.
        dist.barrier()
        self.group = dist.new_group(list(range(size)))

    def gossip(self, tensors: list[torch.Tensor], **config) -> Gossip:
        settings = GossipConfig(**config)
        peers = neighbours(settings.topology, self.rank, self.size)
        return Gossip(
            tensors,
            learner=self.rank,
            learners=self.size,
            transport=SocketTransport(self.store, self.rank, peers, 60.0),
            config=settings,
        )

    def sum(self, tensors: list[torch.Tensor]) -> float:
        total = torch.stack([tensor.detach().double().sum() for tensor in tensors]).sum()
        dist.all_reduce(total, group=self.group)
        return total.item()


def take(gossip: Gossip, tensors: list[torch.Tensor]) -> bool:
    delta = gossip.take()
    if delta is not None:
        add_flat(tensors, delta)
    return delta is not None


def mixes(party: Party, **config):
    """At a learning rate of zero the mean stays, and all arrive at it."""
    torch.manual_seed(party.rank)
    tensors = [torch.randn(300, 700), torch.randn(5)]
    before = party.sum(tensors), consensus_distance(tensors, party.group)
    # The squared distance of independent weights of variance 1 from their mean.
    expected = 210_005 * (1 - 1 / party.size)
    assert abs(before[1] / expected - 1) < 0.02, (before, expected)
    gossip = party.gossip(tensors, **config)
    gossip.start()
    fewest = torch.zeros(())
    while fewest < 30:
        take(gossip, tensors)
        gossip.publish()
        fewest.fill_(gossip.counters().exchanges)
        # Collective calls of another group do not disturb the exchanges.
        dist.all_reduce(fewest, dist.ReduceOp.MIN, group=party.group)
        time.sleep(0.002)
    gossip.drain()
    take(gossip, tensors)
    after = party.sum(tensors), consensus_distance(tensors, party.group)
    assert abs(after[0] - before[0]) < 0.1, (before, after)
    assert after[1] < 1e-3 * before[1], (before, after)
    assert gossip.counters().bytes > 0


def lockstep(party: Party):
    """Two learners that exchange after each step, in step, are one: the weights of ddp."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    alone = [parameter.detach().clone() for parameter in model.parameters()]
    tensors = list(model.parameters())
    gossip = party.gossip(tensors)
    gossip.start()
    for batch in torch.randn(20, 2, 16, 6):
        local = batch[party.rank]
        loss = (model(local) - local.sum(-1, keepdim=True)).square().mean()
        gradients = torch.autograd.grad(loss, tensors)
        with torch.no_grad():
            for parameter, gradient in zip(tensors, gradients, strict=True):
                parameter.sub_(0.1 * gradient)
        # The passive one first, so that the other finds what it has just learned.
        for turn in (1, 0):
            if party.rank == turn:
                gossip.publish()
            dist.barrier(group=party.group)
        while not take(gossip, tensors):
            time.sleep(0.001)
        for weight, parameter, gradient in zip(alone, tensors, gradients, strict=True):
            # ddp: the mean gradient of both, from the same weights.
            mean = gradient.clone()
            dist.all_reduce(mean, group=party.group)
            weight.sub_(0.1 * mean / 2)
            torch.testing.assert_close(parameter.detach(), weight, rtol=0, atol=1e-5)
    gossip.drain()
    assert gossip.counters().exchanges == 20
    assert gossip.counters().staleness_max == 0


def learners_that_live(context: DistributedContext):
    scenarios = [
        (4, lambda party: mixes(party, topology="random")),
        (3, mixes),
        (2, lockstep),
    ]
    for number, (size, scenario) in enumerate(scenarios):
        party = Party(context, number, size)
        if party.rank < size:
            scenario(party)


def test_learners_mix_lose_nothing_and_in_step_are_ddp():
    for result in check_ranks(learners_that_live, size=4):
        assert "lost" not in result.stderr
