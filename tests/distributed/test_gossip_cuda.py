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
    size, steps = 1_000_000, 60
    weights = [[torch.full((size,), float(n), device="cuda")] for n in range(3)]
    errors = []

    def train(n: int):
        try:
            gossip = Gossip(
                weights[n], learner=n, learners=3, transport=transports[n], config=GossipConfig()
            )
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                gossip.start()
                for _ in range(steps + 20 * n):
                    delta = gossip.take()
                    if delta is not None:
                        add_flat(weights[n], delta)
                    torch.cuda._sleep(2_000_000)
                    weights[n][0] += 1
                    gossip.publish()
                    time.sleep(0.0005)
                gossip.drain()
                delta = gossip.take()
                if delta is not None:
                    add_flat(weights[n], delta)
                stream.synchronize()
            assert gossip.counters().applied == gossip.counters().exchanges > 5
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
    expected = 0 + 1 + 2 + 3 * steps + 20 * (0 + 1 + 2)
    torch.testing.assert_close(total, torch.full_like(total, expected), rtol=1e-6, atol=0)
