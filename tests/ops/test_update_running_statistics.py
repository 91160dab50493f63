from typing import Any

import pytest
import torch
from torch import Tensor, nn

from effasr_kernels import PackedLayout, update_running_statistics


def _given(channels: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    mean, variance = torch.randn(channels, dtype=dtype), torch.rand(channels, dtype=dtype) + 0.5
    return [mean, variance, torch.tensor(0)]


@pytest.mark.parametrize("sizes", [(4, 0, 7), (2,)])
def test_moves_as_the_module_of_torch(sizes: tuple[int, ...]) -> None:
    theirs = nn.BatchNorm1d(3, momentum=0.3).double()
    mean, variance, batches = _given()
    theirs.running_mean, theirs.running_var = mean.clone(), variance.clone()
    layout = PackedLayout.from_lengths(sizes, rows=sum(sizes) + 5)
    for _ in range(3):
        x = torch.randn(layout.total, 3, dtype=torch.float64)
        theirs(x)
        found = x.mean(0), x.var(0, correction=0)
        update_running_statistics(mean, variance, batches, *found, layout, momentum=0.3)
    torch.testing.assert_close(mean, theirs.running_mean)
    torch.testing.assert_close(variance, theirs.running_var)
    assert batches == theirs.num_batches_tracked == 3


def test_a_batch_without_a_row_moves_nothing_and_one_row_divides_by_one() -> None:
    mean, variance, batches = _given()
    before = mean.clone(), variance.clone()
    zeros = torch.zeros(3, dtype=torch.float64)
    empty = PackedLayout.from_lengths((0,), rows=4)
    update_running_statistics(mean, variance, batches, zeros, zeros, empty)
    assert torch.equal(mean, before[0])
    assert torch.equal(variance, before[1])
    one = PackedLayout.from_lengths((1,))
    update_running_statistics(mean, variance, batches, zeros, zeros, one)
    torch.testing.assert_close(variance, 0.9 * before[1])
    assert batches == 2


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.ones(2), r"`running_mean` must have shape \(C,\) = \(3,\)"),
        (1, torch.ones(3).half(), "`running_variance` must be torch.float32"),
        (0, torch.ones(6)[::2], "`running_mean` must be contiguous"),
        (2, torch.tensor(0.0), "`num_batches` must be int64"),
        (4, torch.ones(3).double(), "`variance` must be torch.float32"),
        (2, torch.tensor(0, device="meta"), "`num_batches` must be on cpu"),
    ],
)
def test_wrong_arguments_are_named(index: int, value: Any, message: str) -> None:
    given: list[Any] = [*_given(3, torch.float32), torch.ones(3), torch.ones(3)]
    given[index] = value
    with pytest.raises(ValueError, match=message):
        update_running_statistics(*given, PackedLayout.from_lengths((2,)))


def test_momentum_is_a_share() -> None:
    given = [*_given(), torch.ones(3).double(), torch.ones(3).double()]
    with pytest.raises(ValueError, match="`momentum` must be in"):
        update_running_statistics(*given, PackedLayout.from_lengths((2,)), momentum=1.5)
