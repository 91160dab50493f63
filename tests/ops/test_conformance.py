"""Each check of the contract fails on an operation that breaks it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from effasr_kernels import PackedLayout, depthwise_conv
from effasr_kernels.shared.ragged import join_rows, split_rows
from tests.support.conformance import (
    Case,
    Packed,
    Shared,
    check_compiler,
    check_dispatcher,
    check_dtypes,
    check_gradients,
    check_neighbours,
    check_order,
    check_repeats,
    check_static_shape,
    check_strides,
)
from tests.support.tolerance import assert_no_worse


def _case(run: Callable[[Packed, Shared], Tensor]) -> Case:
    return Case(
        run,
        {"x": [torch.randn(n, 2, dtype=torch.float64) for n in (3, 0, 2)]},
        {"weight": torch.randn(2, 3, dtype=torch.float64)},
        results=("x",),
    )


def _good(packed: Packed, shared: Shared) -> Tensor:
    return depthwise_conv(packed["x"].values, shared["weight"], packed["x"].layout)


def _blind_to_ends(packed: Packed, shared: Shared) -> Tensor:
    x = packed["x"].values
    return depthwise_conv(x, shared["weight"], PackedLayout.from_lengths([x.shape[0]]))


def _masked_by_zero(packed: Packed, shared: Shared) -> Tensor:
    """Right but for ``0 * NaN``."""
    return packed["x"].values * shared["weight"].sum() * packed["x"].layout.mask()[:, None]


def _narrow(packed: Packed, shared: Shared) -> Tensor:
    """Sums one sequence after the other in its own dtype."""
    return _by_sequence(packed, lambda x: (x * 1.001).cumsum(0) * shared["weight"][0, 0])


def _past_the_dispatcher(packed: Packed, shared: Shared) -> Tensor:
    return _by_sequence(packed, lambda x: x @ shared["weight"][:, :2])


def _by_sequence(packed: Packed, change: Callable[[Tensor], Tensor]) -> Tensor:
    x, layout = packed["x"].values, packed["x"].layout
    return join_rows([change(piece) for piece in split_rows(x, layout)], layout, x)


def _by_place(packed: Packed, shared: Shared) -> Tensor:
    y = _good(packed, shared)
    return y * torch.arange(1, y.shape[0] + 1)[:, None]


def _by_memory(packed: Packed, shared: Shared) -> Tensor:
    """Reads the storage as if it were contiguous."""
    x = packed["x"].values
    again = x.as_strided(x.shape, (x.shape[1], 1))
    return depthwise_conv(again, shared["weight"], packed["x"].layout)


def _breaks_the_graph(packed: Packed, shared: Shared) -> Tensor:
    torch._dynamo.graph_break()
    return _good(packed, shared)


@pytest.mark.parametrize(
    ("rule", "run"),
    [
        (check_order, _by_place),
        (check_order, _blind_to_ends),
        (check_static_shape, _blind_to_ends),
        (check_static_shape, _masked_by_zero),
        (check_neighbours, _blind_to_ends),
        (check_strides, _by_memory),
        (check_repeats, lambda *given: _good(*given) * torch.rand(())),
        (check_dispatcher, _past_the_dispatcher),
        (check_dtypes, _narrow),
        (check_gradients, lambda *given: (_good(*given) + _good(*given).detach()) / 2),
        (check_compiler, _breaks_the_graph),
    ],
)
def test_a_bad_operation_is_caught(
    rule: Callable[[Case], None], run: Callable[[Packed, Shared], Tensor]
) -> None:
    with pytest.raises((AssertionError, GradcheckError, torch._dynamo.exc.Unsupported)):
        rule(_case(run))


def test_no_worse_allows_twice_the_error_and_two_ulp() -> None:
    gold = torch.tensor([1.0, 1.0], dtype=torch.float64)
    baseline = torch.tensor([1.0, 1.001])
    assert_no_worse(torch.tensor([1.002, 1.0]), gold, baseline)
    assert_no_worse(torch.tensor([1.0, 1.0 + 2**-22]), gold, torch.ones(2))
    for bad in (1.0021, torch.nan):
        with pytest.raises(AssertionError):
            assert_no_worse(torch.tensor([1.0, bad]), gold, baseline)
    assert_no_worse(torch.zeros(0), torch.zeros(0).double(), torch.zeros(0))
    exact = torch.zeros(1)
    assert_no_worse(torch.tensor([2**-20]), exact.double(), exact, cancelled=2**-19)
    for left, cancelled in ((2**-18, 2**-19), (2**-20, 0.0)):
        with pytest.raises(AssertionError):
            assert_no_worse(torch.tensor([left]), exact.double(), exact, cancelled=cancelled)
