import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels import PackedLayout, pack, strided_depthwise

BINS, CHANNELS = 4, 3


def test_relu_is_that_of_torch() -> None:
    layout, lengths = PackedLayout.from_lengths((4, 0, 3)), torch.tensor([7, 0, 6])
    leaves = [torch.randn(n, dtype=torch.float64) for n in ((14, BINS, CHANNELS), (CHANNELS, 9))]
    leaves.append(torch.randn(CHANNELS, dtype=torch.float64))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    x, *filters = leaves
    results = [
        strided_depthwise(x, *filters, layout, lengths, relu=True),
        strided_depthwise(x.relu(), *filters, layout, lengths),
    ]
    torch.testing.assert_close(*results)
    grads = [torch.autograd.grad(y.square().sum(), leaves) for y in results]
    torch.testing.assert_close(*grads)
    assert (grads[0][0][x < 0] == 0).all()


@pytest.mark.parametrize("rows", [(1, 2, 3, 4), (5, 0, 17, 1)])
@pytest.mark.parametrize("bins", [2, 6])
def test_matches_torch_on_each_sequence(rows: tuple[int, ...], bins: int) -> None:
    sequences = [torch.randn(n, bins, CHANNELS, dtype=torch.float64) for n in rows]
    weight = torch.randn(CHANNELS, 9, dtype=torch.float64)
    bias = torch.randn(CHANNELS, dtype=torch.float64)
    # What stands in the rows that are not real does not count.
    padded = [F.pad(x, (0, 0, 0, 0, 0, len(x) % 2), value=torch.nan) for x in sequences]
    packed = pack([x.view(-1, 2, bins, CHANNELS) for x in padded])
    x = packed.values.flatten(0, 1)
    y = strided_depthwise(x, weight, bias, packed.layout, torch.tensor(rows))
    for x_n, y_n in zip(sequences, y.split(packed.layout.lengths), strict=True):
        if len(x_n):
            image, taps = x_n.permute(2, 0, 1)[None], weight.view(-1, 1, 3, 3)
            expected = F.conv2d(image, taps, bias, stride=2, padding=1, groups=CHANNELS)
            torch.testing.assert_close(y_n, expected[0].permute(1, 2, 0))


def test_results_of_rows_that_are_not_real_are_zero() -> None:
    layout = PackedLayout.from_lengths((4,))
    x = torch.randn(8, BINS, CHANNELS, requires_grad=True)
    y = strided_depthwise(
        x, torch.randn(CHANNELS, 9), torch.ones(CHANNELS), layout, torch.tensor([3])
    )
    assert y[:2].all()
    assert not y[2:].any()
    y.sum().backward()
    assert x.grad is not None
    assert x.grad[:3].all()
    assert not x.grad[3:].any()


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_cutting_a_batch_changes_nothing(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PackedLayout.from_lengths((4, 1, 0, 7), rows=14)
    leaves = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((28, BINS, CHANNELS), (CHANNELS, 9), (CHANNELS,))
    ]

    def run() -> list[Tensor]:
        y = strided_depthwise(*leaves, layout, torch.tensor([8, 1, 0, 13]))
        grad = torch.arange(y.numel(), dtype=y.dtype).cos().view_as(y)
        return [y, *torch.autograd.grad(y, leaves, grad)]

    whole = run()
    reference = importlib.import_module("effasr_kernels.strided_depthwise.reference")
    monkeypatch.setattr(reference, "_SLOTS", slots)
    for got, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(got, expected)
