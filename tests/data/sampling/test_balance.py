import numpy as np
import pytest

from effasr.data.sampling.packing import group_into_steps, imbalance


def test_micro_batches_of_like_cost_share_a_step() -> None:
    cost = np.random.default_rng(0).integers(1000, 1100, 64)
    chosen = group_into_steps(cost, 8, seed=0, epoch=0)
    assert sorted(chosen.ravel().tolist()) == list(range(64))
    assert imbalance(cost[chosen].ravel(), 8, 8).max() < 0.02 < imbalance(cost, 8, 8).max()
    # Steps do not come in the order of their cost.
    assert not (np.diff(cost[chosen].sum(axis=1)) > 0).all()


@pytest.mark.parametrize("micro_batches", [4, 6, 12, 16])
def test_ranks_are_balanced_whatever_their_number(micro_batches: int) -> None:
    cost = np.arange(1000, 1000 + 10 * micro_batches)
    chosen = group_into_steps(cost, micro_batches, seed=0, epoch=0)
    for world_size in range(1, micro_batches + 1):
        if micro_batches % world_size == 0:
            share = micro_batches // world_size
            # Of what unequal neighbours leave, ranks share more the more they have to share.
            bound = micro_batches / 1000 / share
            assert imbalance(cost[chosen].ravel(), micro_batches, world_size).max() <= bound


def test_imbalance() -> None:
    cost = np.array([1, 3, 3, 1, 0, 0, 0, 0])
    assert imbalance(cost, 4, 4).tolist() == [0.5, 0.0]
    assert imbalance(cost, 4, 2).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="`world_size` must divide `micro_batches` = 4, but is 3"):
        imbalance(cost, 4, 3)
