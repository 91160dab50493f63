import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from effasr.distributed.async_sgd.gossip import mixer as mixer_module
from effasr.distributed.async_sgd.gossip.config import (
    GossipConfig,
    TLSConfig,
    choose,
    is_active,
    neighbours,
)
from effasr.distributed.async_sgd.gossip.mixer import CompletedCopy, FlatWeights
from effasr.distributed.averager import add_flat
from tests.distributed.gossip_reference import Learner

# Learners 0 and 2 begin exchanges, 1 answers.
ACTIVE = (0, 2)
ACTIONS = ("update", "publish", "take", "advance", "send", "answer", "finish")


class Events:
    """Three learners, and what is on its way between them."""

    def __init__(self):
        self.learners = [Learner(torch.arange(5.0) * (10 + n)) for n in range(3)]
        self.start = [learner.weights.clone() for learner in self.learners]
        self.received = [torch.zeros(5) for _ in self.learners]
        self.total = sum(self.start)
        self.sent: dict[int, torch.Tensor] = {}
        self.answered: dict[int, torch.Tensor] = {}

    def do(self, action: str, n: int):
        learner = self.learners[n]
        if action == "update":
            learner.update(n + 1)
            self.total = self.total + n + 1
        elif action == "publish":
            learner.publish()
        elif action == "take":
            learner.take()
        elif action == "advance":
            learner.device.advance()
        elif n not in ACTIVE:
            return
        elif action == "send" and not {n} & {*self.sent, *self.answered}:
            self.sent[n] = learner.mixer.snapshot().clone()
            self.check_view(n, self.sent[n])
        elif action == "answer" and n in self.sent:
            got = self.sent.pop(n)
            message = got.clone()
            self.learners[1].mixer.answer(message)
            self.check_view(1, message)
            self.received[1] += (got - message) / 2
            self.answered[n] = message
            self.received[n] -= (got - message) / 2
        elif action == "finish" and n in self.answered:
            learner.mixer.average(self.answered.pop(n))

    def check_view(self, n: int, view: torch.Tensor):
        """What others see: the updates up to a version, and every delta received."""
        updates = (n + 1) * self.learners[n].mixer._view_version
        expected = self.start[n] + updates + self.received[n]
        torch.testing.assert_close(view, expected, rtol=0, atol=2e-3)

    def drain(self):
        for n in ACTIVE:
            self.do("answer", n)
            self.do("finish", n)
        for learner in self.learners:
            learner.settle()

    def check(self):
        now = sum(learner.weights for learner in self.learners)
        torch.testing.assert_close(now, self.total, rtol=0, atol=2e-3)
        assert all(learner.mixer.non_finite == 0 for learner in self.learners)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2)), max_size=60))
def test_no_order_of_events_loses_an_update(events):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixer_module, "_PIECE", 2)
        state = Events()
        for event in events:
            state.do(*event)
        state.drain()
        state.check()
        for learner in state.learners:
            learner.publish()
            torch.testing.assert_close(learner.mixer.snapshot(), learner.weights)


def test_both_sides_change_by_the_same_but_for_the_sign():
    weights = torch.randn(2, 1000) * 10 ** torch.randn(2, 1000)
    first, second = (Learner(row) for row in weights)
    message = first.mixer.snapshot().clone()
    second.mixer.answer(message)
    first.mixer.average(message)
    deltas = []
    for learner in (first, second):
        learner.device.finish()
        deltas.append(learner.mixer.take(0))
    assert torch.equal(deltas[0], -deltas[1])


def test_staleness_counts_updates_since_the_copy():
    learner = Learner(torch.zeros(3))
    assert learner.mixer.take(0) is None
    publish = lambda: learner.mixer.publish(lambda buffer: CompletedCopy(), learner.updates)
    learner.device.finish()
    learner.mixer.answer(torch.ones(3))  # of version 0
    learner.updates = 2
    publish()
    learner.mixer.answer(torch.ones(3))  # of version 2
    learner.updates = 5
    assert learner.mixer.take(5) is not None
    assert (learner.mixer.applied, learner.mixer.staleness_sum) == (2, 5 + 3)
    assert learner.mixer.staleness_max == 5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bad", [0, 1])
def test_what_is_not_finite_stays_where_it_is(monkeypatch, value, bad):
    monkeypatch.setattr(mixer_module, "_PIECE", 2)
    rows = torch.tensor([[1.0, 1, 1, 1], [3.0, 3, 3, 3]])
    rows[bad, 3] = value
    first, second = (Learner(row.clone()) for row in rows)
    message = first.mixer.snapshot().clone()
    second.mixer.answer(message)
    first.mixer.average(message)
    for learner, row in zip((first, second), rows, strict=True):
        learner.settle()
        assert learner.weights.tolist()[:2] == [2.0, 2.0]
        torch.testing.assert_close(learner.weights[2:], row[2:], equal_nan=True)
        assert learner.mixer.non_finite == 1


def test_who_computes_never_waits_for_an_exchange(monkeypatch):
    learner = Learner(torch.zeros(4))
    learner.device.finish()
    learner.mixer.answer(torch.ones(4))
    inside, go_on = threading.Event(), threading.Event()
    sub = torch.sub

    def slow(*args):
        inside.set()
        assert go_on.wait(10)
        return sub(*args)

    monkeypatch.setattr(torch, "sub", slow)
    thread = threading.Thread(target=learner.mixer.answer, args=(torch.ones(4),))
    thread.start()
    assert inside.wait(10)
    for _ in range(5):
        assert learner.mixer.take(0) is None
        learner.publish()
        learner.device.finish()
    go_on.set()
    thread.join()
    learner.settle()
    # Both averages with ones: 0 -> 1/2 -> 3/4.
    assert learner.weights.tolist() == [0.75] * 4


def test_a_device_that_is_always_behind_is_seen_all_the_same():
    """The host publishes its next weights before the last ones have left the device."""
    learner = Learner(torch.zeros(1))
    seen = []
    for _ in range(20):
        learner.update(1.0)
        learner.publish()
        learner.mixer.answer(torch.zeros(1))
        seen.append(learner.mixer._view_version)
        # Half an update behind, and with what it was asked to do before.
        while len(learner.device._work) > 2:
            learner.device.advance()
    assert seen == sorted(seen)
    assert seen[-1] >= 15, seen


topologies = st.sampled_from(["ring", "random"])


@given(topologies, st.integers(2, 70))
def test_everybody_is_connected_over_edges_between_an_active_and_a_passive_one(topology, learners):
    beside = [neighbours(topology, n, learners) for n in range(learners)]
    for learner, other_items in enumerate(beside):
        assert other_items, "a learner without neighbour"
        assert list(other_items) == sorted(set(other_items))
        for other in other_items:
            assert is_active(other) != is_active(learner)
            assert learner in beside[other]
    reached, new = set(), {0}
    while new:
        reached |= new
        new = {other for n in new for other in beside[n]} - reached
    assert reached == set(range(learners))


def test_a_ring_takes_turns_and_random_is_repeatable_and_reaches_all():
    assert [choose("ring", 0, 2, (1, 3), n) for n in range(4)] == [1, 3, 1, 3]
    draw = lambda seed, learner: [
        choose("random", seed, learner, (1, 3, 5, 7), count) for count in range(64)
    ]
    assert draw(0, 0) == draw(0, 0)
    assert set(draw(0, 0)) == {1, 3, 5, 7}
    assert len({tuple(draw(seed, learner)) for seed in (0, 1) for learner in (0, 2)}) == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FlatWeights([]), "`tensors` must not be empty"),
        (lambda: FlatWeights([torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)]),
         r"number 1 is torch\.bfloat16"),
        (lambda: add_flat([torch.zeros(3)], torch.zeros(2)), r"`delta` must have shape \(3,\)"),
        (lambda: neighbours("ring", 0, 1), "`learners` must be at least 2, but is 1"),
        (lambda: neighbours("ring", 4, 4), "`learner` must be from 0 to 3, but is 4"),
        (lambda: GossipConfig(topology="star"), "`topology` must be"),
        (lambda: GossipConfig(learner_size=0), "`learner_size` must be"),
        (lambda: GossipConfig(period=0), "`period` must be"),
        (lambda: GossipConfig(timeout_s=0.0), "`timeout_s` must be"),
        (lambda: TLSConfig(ca="a", certificate="b", key=""), "must be the path of a PEM file, bu"),
    ],
)  # fmt: skip
def test_error_messages(make, message):
    with pytest.raises(ValueError, match=message):
        make()
