import numpy as np
import pytest

from effasr.data.sampling.packing import imbalance


def test_imbalance() -> None:
    cost = np.array([1, 3, 3, 1, 0, 0, 0, 0])
    assert imbalance(cost, 4, 4).tolist() == [0.5, 0.0]
    assert imbalance(cost, 4, 2).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="`world_size` must divide `micro_batches` = 4, but is 3"):
        imbalance(cost, 4, 3)
