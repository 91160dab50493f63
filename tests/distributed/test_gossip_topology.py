import pytest
from hypothesis import given
from hypothesis import strategies as st

from effasr.distributed.async_sgd.gossip.config import GossipConfig
from effasr.distributed.async_sgd.gossip.topology import choose, is_active, neighbours
from tests.distributed.gossip_reference import edges

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


def test_who_is_alone_or_not_there_is_told():
    with pytest.raises(ValueError, match="`learners` must be at least 2, but is 1"):
        neighbours("ring", 0, 1)
    with pytest.raises(ValueError, match="`learner` must be from 0 to 3, but is 4"):
        neighbours("ring", 4, 4)


@given(st.integers(2, 70))
def test_topologies_have_as_many_edges_as_they_can(learners):
    in_ring = {0: learners, 1: learners - 1}[learners % 2] - (learners == 2)
    assert len(edges("ring", learners)) == in_ring
    assert len(edges("random", learners)) == (learners + 1) // 2 * (learners // 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("topology", "star"), ("learner_size", 0), ("period", 0), ("timeout_s", 0.0)],
)
def test_configuration_is_checked(field, value):
    with pytest.raises(ValueError, match=f"`{field}` must be"):
        GossipConfig(**{field: value})
