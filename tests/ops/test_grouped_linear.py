"""The reference of `grouped_linear`: a linear layer for each group of rows."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from effasr_kernels import PackedLayout, grouped_linear
from effasr_kernels.testing.conformance import Case, Packed, Shared, check_compiler

GROUPS, INPUTS, OUTPUTS = 3, 4, 5


def sorted_by_group(packed: Packed, shared: Shared, backend: str | None = None) -> Tensor:
    """Multiply rows of packed sequences, each by the weight of the group that it names."""
    groups, x = shared["weight"].shape[0], packed["x"].values
    # The tail names no group, and is sorted behind all of them.
    group = packed["group"].values
    group = torch.where(group < 0, groups, group)
    order = group.argsort(stable=True)
    bounds = torch.arange(groups + 1, device=x.device)
    offsets = torch.searchsorted(group[order], bounds).int()
    layout = PackedLayout.from_offsets(offsets, x.shape[0])
    y = grouped_linear(x[order], shared["weight"], layout, bias=shared.get("bias"), backend=backend)
    return y[order.argsort()]


def _case(lengths: tuple[int, ...], *, bias: bool = True) -> Case:
    shared = {"weight": torch.randn(GROUPS, OUTPUTS, INPUTS, dtype=torch.float64)}
    if bias:
        shared["bias"] = torch.randn(GROUPS, OUTPUTS, dtype=torch.float64)
    return Case(
        sorted_by_group,
        {
            "x": [torch.randn(n, INPUTS, dtype=torch.float64) for n in lengths],
            "group": [torch.randint(GROUPS, (n,)) for n in lengths],
        },
        shared,
        results=("x",),
    )


@pytest.mark.parametrize("bias", [False, True])
def test_keeps_the_contract(
    check: Callable[[Case], None], lengths: tuple[int, ...], bias: bool
) -> None:
    check(_case(lengths, bias=bias))


def test_compiles() -> None:
    check_compiler(_case((5, 0, 2)))


@pytest.mark.parametrize("sizes", [(4, 0, 3), (0, 7, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("tail", [0, 2])
def test_is_a_loop_over_groups(sizes: tuple[int, ...], tail: int) -> None:
    layout = PackedLayout.from_lengths(sizes, rows=sum(sizes) + tail)
    leaves = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((layout.rows, INPUTS), (GROUPS, OUTPUTS, INPUTS), (GROUPS, OUTPUTS))
    ]
    x, weight, bias = leaves
    y = grouped_linear(x, weight, layout, bias=bias)
    # A sum of nothing, so that it has a gradient where no group has rows.
    expected = torch.zeros(layout.rows, OUTPUTS, dtype=torch.float64) + bias[:0].sum()
    first = 0
    for group, length in enumerate(sizes):
        for row in range(first, first + length):
            expected[row] = weight[group] @ x[row] + bias[group]
        first += length
    torch.testing.assert_close(y, expected)
    upstream = torch.randn_like(y)
    actual = torch.autograd.grad(y, leaves, upstream, materialize_grads=True)
    wanted = torch.autograd.grad(expected, leaves, upstream, allow_unused=True)
    for gradient, other in zip(actual, wanted, strict=True):
        zeros = torch.zeros_like(gradient)
        torch.testing.assert_close(gradient, zeros if other is None else other)


def test_one_group_is_a_linear_layer_to_the_bit() -> None:
    layer = torch.nn.Linear(INPUTS, OUTPUTS)
    x = torch.randn(9, INPUTS)
    layout = PackedLayout.from_lengths((9,))
    weight, bias = layer.weight[None], layer.bias[None]
    assert torch.equal(grouped_linear(x, weight, layout, bias=bias), layer(x))


def test_no_expert_but_the_chosen_one_costs_anything() -> None:
    counts = []
    for groups in (1, 8):
        layout = PackedLayout.from_lengths((6, *[0] * (groups - 1)))
        weight = torch.zeros(groups, OUTPUTS, INPUTS)
        with FlopCounterMode(display=False) as counter:
            grouped_linear(torch.zeros(6, INPUTS), weight, layout)
        counts.append(counter.get_total_flops())
    assert counts == [2 * 6 * INPUTS * OUTPUTS] * 2


def test_frozen_weights_have_no_gradient() -> None:
    layout = PackedLayout.from_lengths((2, 1))
    x, weight = torch.randn(3, INPUTS, requires_grad=True), torch.randn(2, OUTPUTS, INPUTS)
    grouped_linear(x, weight, layout).sum().backward()
    assert x.grad is not None
    expected = torch.cat([weight[0].sum(0).expand(2, -1), weight[1].sum(0)[None]])
    torch.testing.assert_close(x.grad, expected)
    assert weight.grad is None


def test_autocast_narrows_the_products() -> None:
    layout = PackedLayout.from_lengths((2, 1))
    x, weight = torch.randn(3, INPUTS), torch.randn(2, OUTPUTS, INPUTS)
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped_linear(x, weight, layout)
    assert y.dtype == torch.bfloat16
    whole = torch.cat([F.linear(x[:2], weight[0]), F.linear(x[2:], weight[1])])
    torch.testing.assert_close(y.float(), whole, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3)}, r"`x` must have shape \(T, C\)"),
        ({"x": torch.zeros(4, 2)}, "`x` must have 3 rows, as `layout` does"),
        ({"weight": torch.zeros(3, 5, 2)}, r"`weight` must have shape \(G, F, C\) = \(2, any, 2\)"),
        ({"weight": torch.zeros(2, 5, 3)}, r"`weight` must have shape \(G, F, C\) = \(2, any, 2\)"),
        ({"bias": torch.zeros(5)}, r"`bias` must have shape \(G, F\) = \(2, 5\)"),
        ({"bias": torch.zeros(2, 5).double()}, "`bias` must be torch.float32, as `x` is"),
        (
            {"layout": PackedLayout.from_lengths((), rows=3), "weight": torch.zeros(0, 5, 2)},
            "`weight` must have at least one group",
        ),
    ],
    ids=str,
)
def test_says_what_is_wrong(changes: dict, message: str) -> None:
    layout = PackedLayout.from_lengths((1, 2))
    arguments = {"x": torch.zeros(3, 2), "weight": torch.zeros(2, 5, 2), "layout": layout}
    with pytest.raises(ValueError, match=f"grouped_linear: {message}"):
        grouped_linear(**arguments | changes)
