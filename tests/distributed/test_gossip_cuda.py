"""Weights on a GPU whose host runs ahead of it."""

import threading
import time

import pytest
import torch

from effasr.distributed.async_sgd.gossip.config import GossipConfig
from effasr.distributed.async_sgd.gossip.gossip import Gossip
from effasr.distributed.async_sgd.gossip.mixer import FlatWeights
from effasr.distributed.averager import add_flat
from tests.distributed.gossip_reference import connect

pytestmark = pytest.mark.gpu


def test_a_copy_holds_the_weights_as_they_were_when_it_was_asked_for():
    tensors = [torch.zeros(1000, 1000, device="cuda"), torch.zeros(7, device="cuda")]
    weights = FlatWeights(tensors)
    rows = [torch.empty(weights.count, pin_memory=True) for _ in range(6)]
    events = []
    for version, row in enumerate(rows):
        torch.cuda._sleep(20_000_000)
        for tensor in tensors:
            tensor.fill_(version)
        events.append(weights.copy_to(row))
    assert not events[-1].query(), "the host waited for the GPU"
    for version, (row, event) in enumerate(zip(rows, events, strict=True)):
        event.synchronize()
        assert torch.equal(row, torch.full_like(row, version))
    add_flat(tensors, rows[1])
    assert tensors[1].tolist() == [6.0] * 7


def test_no_update_is_lost_while_gpus_are_behind_their_hosts():
    transports = connect(0, 1, 2)
    size, steps, least = 1_000_000, 60, 3
    weights = [[torch.full((size,), float(n), device="cuda")] for n in range(3)]
    learners = [
        Gossip(weights[n], learner=n, learners=3, transport=transports[n], config=GossipConfig())
        for n in range(3)
    ]
    updates, errors = [0] * 3, []

    def goes_on(n: int) -> bool:
        # However fast the updates are, each learner exchanges some of them with others.
        is_behind = min(learner.counters().exchanges for learner in learners) < least
        return not errors and (is_behind or updates[n] < steps + 20 * n)

    def train(n: int):
        try:
            gossip, stream = learners[n], torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                gossip.start()
                while goes_on(n):
                    delta = gossip.take()
                    if delta is not None:
                        add_flat(weights[n], delta)
                    torch.cuda._sleep(2_000_000)
                    weights[n][0] += 1
                    updates[n] += 1
                    gossip.publish()
                    time.sleep(0.0005)
                gossip.drain()
                delta = gossip.take()
                if delta is not None:
                    add_flat(weights[n], delta)
                stream.synchronize()
            assert gossip.counters().applied == gossip.counters().exchanges >= least
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(n,), daemon=True) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    total = sum(rows[0].double() for rows in weights)
    # Each difference that is added is rounded by up to 2**-24 of the weight.
    rounding = 2**-24 * sum(learner.counters().applied for learner in learners)
    expected = torch.full_like(total, 0 + 1 + 2 + sum(updates))
    torch.testing.assert_close(total, expected, rtol=rounding, atol=0)
