"""Learners in processes of their own, over TCP."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from effasr.distributed.async_sgd.gossip.config import GossipConfig
from effasr.distributed.async_sgd.gossip.gossip import Gossip
from effasr.distributed.async_sgd.gossip.sockets import SocketTransport
from effasr.distributed.async_sgd.gossip.topology import neighbours
from effasr.distributed.async_sgd.weight_averaging import consensus_distance
from effasr.distributed.averager import add_flat
from effasr.distributed.process_group import DistributedContext
from tests.support.run_ranks import check_ranks, run_ranks


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


def late(party: Party):
    """A learner that begins or drains late, but not as late as the limit, is waited for."""
    tensors = [torch.full((3,), float(party.rank))]
    gossip = party.gossip(tensors, timeout_s=6.0)
    time.sleep(2 if party.rank == 1 else 0)
    gossip.start()
    time.sleep(2 if party.rank == 2 else 0)
    gossip.publish()
    gossip.drain()
    take(gossip, tensors)
    assert party.sum(tensors) == 3 * (0 + 1 + 2 + 3)
    assert gossip.counters().lost == ()


def learners_that_live(context: DistributedContext):
    scenarios = [
        (4, lambda party: mixes(party, topology="random")),
        (3, mixes),
        (2, lockstep),
        (4, late),
    ]
    for number, (size, scenario) in enumerate(scenarios):
        party = Party(context, number, size)
        if party.rank < size:
            scenario(party)


def one_of_four_is_killed(context: DistributedContext):
    victim = 1
    party = Party(context, 0, 4)
    tensors = [torch.zeros(1_000_000)]
    gossip = party.gossip(tensors)
    gossip.start()
    neighbour = (party.rank - victim) % 2 == 1
    limit = time.monotonic() + 30.0
    steps, after, exchanges = 0, 0, 0
    # A neighbour goes on for 50 steps after it has noticed.
    while after < 50 and (neighbour or steps < 200):
        assert time.monotonic() < limit, (steps, after)
        take(gossip, tensors)
        tensors[0].add_(1.0)
        gossip.publish()
        time.sleep(0.005)
        steps += 1
        if party.rank == victim and steps == 20:
            os._exit(7)
        if gossip.counters().lost:
            exchanges = exchanges or gossip.counters().exchanges
            after += 1
    gossip.drain()
    counters = gossip.counters()
    assert counters.lost == ((victim,) if neighbour else ()), counters
    assert counters.exchanges > exchanges + 5, (counters, exchanges)
    sys.stdout.write(f"learner {party.rank} went on\n")
    sys.stdout.flush()
    # What is collective needs all, and so would an orderly end.
    time.sleep(1.0)
    os._exit(0)


def test_learners_mix_lose_nothing_and_in_step_are_ddp():
    for result in check_ranks(learners_that_live, size=4):
        assert "lost" not in result.stderr


def test_a_killed_learner_leaves_the_others_running():
    first, killed, *other_items = run_ranks(one_of_four_is_killed, size=4)
    assert killed.returncode == 7
    for learner, result in zip((0, 2, 3), (first, *other_items), strict=True):
        assert result.returncode == 0, result.stderr
        assert f"learner {learner} went on" in result.stdout
        told = f"learner {learner} lost learner 1, and continues with learner 3: " in result.stderr
        assert told == (learner != 3), result.stderr
