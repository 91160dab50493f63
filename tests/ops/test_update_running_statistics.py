import pytest
import torch
from torch import Tensor, nn

from effasr_kernels import PackedLayout, update_running_statistics
from effasr_kernels.runtime import launch
from effasr_kernels.update_running_statistics import updates_together


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


def test_updates_together_are_those_apart_and_a_context_that_raises_makes_none() -> None:
    layout, momenta = PackedLayout.from_lengths((4, 0, 7)), (0.1, 0.1, 0.3)
    states = [_given(channels) for channels in (3, 3, 5)]
    batches = [(torch.randn(n, dtype=torch.float64), torch.rand(n).double()) for n in (3, 3, 5)]

    def update(states: list[list[Tensor]]) -> None:
        for state, batch, momentum in zip(states, batches, momenta, strict=True):
            update_running_statistics(*state, *batch, layout, momentum=momentum)

    def fail() -> None:
        with updates_together():
            update(states)
            raise RuntimeError("out of memory")

    def is_now(expected: list[list[Tensor]]) -> bool:
        pairs = zip(states, expected, strict=True)
        return all(
            torch.equal(x, y) for one, other in pairs for x, y in zip(one, other, strict=True)
        )

    before, apart = ([[x.clone() for x in state] for state in states] for _ in range(2))
    update(apart)
    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    with updates_together():
        update(states)
        assert is_now(before)
    assert is_now(apart)
    update(states)
    assert all(state[2] == 2 for state in states)


def test_an_update_that_waits_refuses_gradients() -> None:
    state, layout = _given(), PackedLayout.from_lengths((4,))
    found = [torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    with updates_together(), pytest.raises(RuntimeError, match="`mean` requires a gradient"):
        update_running_statistics(*state, *found, layout)
    assert state[2] == 0


def test_updates_of_a_kind_take_one_launch() -> None:
    layout = PackedLayout.from_lengths((4, 7))
    with launch.recording() as launches, updates_together():
        for channels, momentum in ((300, 0.1), (300, 0.1), (300, 0.3), (8, 0.1), (300, 0.1)):
            state = *_given(channels, torch.float32), torch.ones(channels), torch.ones(channels)
            update_running_statistics(*state, layout, momentum=momentum)
    assert [x.grid for x in launches] == [(2, 3), (2, 1), (1, 1)]


def test_what_compiled_code_calls_does_not_wait() -> None:
    """It uses the memory of its tensors again."""
    torch._dynamo.reset()
    mean, variance, batches = _given()
    layout = PackedLayout.from_lengths((4,))
    compiled = torch.compile(update_running_statistics, fullgraph=True, backend="aot_eager")
    with updates_together():
        compiled(mean, variance, batches, mean.clone(), variance.clone(), layout)
        assert batches == 1
    assert batches == 1
