"""Work that is shared out through a store, and who is there to do it; learners are threads."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from effasr.distributed.async_sgd.learners import BEAT_S, EvictedError, Membership, WorkQueue


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_each_claim_is_reserved_and_begun_by_one(store):
    def work(learner: int) -> list[int]:
        claims = WorkQueue(store, learner, first=10)
        mine = []
        while (claim := claims.reserve()) < 210:
            assert claims.begin(claim)
            claims.finish(claim)
            mine.append(claim)
        return mine

    with ThreadPoolExecutor(4) as pool:
        done = [claim for mine in pool.map(work, range(4)) for claim in mine]
    assert sorted(done) == list(range(10, 210))


def test_those_who_have_time_begin_what_others_have_only_reserved(store):
    """Two claims lie with a slow learner, one begun, and each other takes what there is."""
    slow = WorkQueue(store, 0, first=0)
    slow_ones = [slow.reserve() for _ in range(5)]
    assert slow.begin(slow_ones[0])

    def take(learner: int) -> list[int]:
        claims, mine = WorkQueue(store, learner, first=0), []
        assert claims.reserve() >= 5
        for claim in claims.unfinished(0, 5):
            if claims.begin(claim):
                mine.append(claim)
                claims.finish(claim)
        return mine

    with ThreadPoolExecutor(3) as pool:
        used = Counter(claim for mine in pool.map(take, range(1, 4)) for claim in mine)
    assert used == Counter([1, 2, 3, 4])
    assert [slow.begin(claim) for claim in slow_ones] == [True, False, False, False, False]
    assert list(slow.unfinished(0, 5)) == [0]
    slow.finish(0)
    assert list(slow.unfinished(0, 5)) == []


def test_what_a_lost_learner_has_begun_is_seized_once(store):
    lost, *other_items = (WorkQueue(store, learner, first=0) for learner in range(4))
    assert lost.begin(lost.reserve())
    assert lost.begin(lost.reserve())
    lost.finish(0)
    assert not any(other.seize(1, lost={3}) for other in other_items)
    assert not other_items[0].seize(2, lost={0}), "nobody has begun it"
    assert [other.seize(1, lost={0}) for other in other_items] == [True, False, False]
    assert list(other_items[1].unfinished(0, 2)) == [1]


def all_meet(members: list[Membership], limit_s: float = 10.0) -> list[list[int]]:
    def meet(one: Membership) -> list[int]:
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            if (present := one.try_synchronize()) is not None:
                return present
            time.sleep(0.01)
        raise AssertionError("nobody came")

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(meet, members))


def test_learners_meet_without_those_who_are_lost(store):
    """One says that it fails, one falls silent and its connection breaks, one is only slow."""
    told = [[] for _ in range(4)]
    members = [
        Membership(PrefixStore("m", store), n, 4, timeout_s=60.0, on_lost=told[n].append)
        for n in range(4)
    ]
    for item in members:
        item.__enter__()
    assert members[0].try_synchronize() is None
    assert all_meet(members) == [[0, 1, 2, 3]] * 4
    members[1].__exit__(RuntimeError, RuntimeError("out of luck"), None)
    begun = time.monotonic()
    # As if its process had ended.
    members[2]._ended.set()
    members[0].suspect(2)
    assert all_meet([members[0], members[3]], limit_s=20.0) == [[0, 3]] * 2
    assert time.monotonic() - begun > BEAT_S
    assert sorted(told[0]) == sorted(told[3]) == [1, 2]
    assert members[0].remaining == [3]
    assert members[3].lost == {1, 2}
    with pytest.raises(EvictedError, match="learner 2 was silent for too long"):
        members[2].check()
    with pytest.raises(EvictedError):
        members[2].try_synchronize()
    for item in (members[0], members[3]):
        item.__exit__(None, None, None)


def test_one_that_is_silent_for_too_long_is_lost_and_nobody_else(store):
    lost = threading.Event()
    quick = Membership(store, 0, 3, timeout_s=2.0, on_lost=lambda _: lost.set())
    silent = Membership(store, 1, 3, timeout_s=2.0, on_lost=lambda _: None)
    third = Membership(store, 2, 3, timeout_s=60.0, on_lost=lambda _: None)
    with quick, third:
        # A connection that breaks proves nothing as long as there are signs of life.
        quick.suspect(2)
        assert silent.try_synchronize() is None
        assert lost.wait(10.0)
        assert quick.lost == {1}
        assert third.lost == frozenset()
        assert quick.try_synchronize() is None
        time.sleep(2 * BEAT_S)
        assert quick.lost == {1}
