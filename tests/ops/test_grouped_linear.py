"""The reference of `grouped_linear`: a linear layer for each group of rows."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from effasr_kernels import PackedLayout, grouped_linear

GROUPS, INPUTS, OUTPUTS = 3, 4, 5


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
