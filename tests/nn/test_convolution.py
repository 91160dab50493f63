"""The Conformer's convolution module, and its batch normalisation, against torch's."""

import pytest
import torch
from torch import nn

from effasr.nn.convolution import BatchNorm, ConformerConvolution
from effasr_kernels import PackedLayout


@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm"])
def test_it_is_the_layers_of_torch_on_each_sequence(norm, tail):
    torch.manual_seed(0)
    module = ConformerConvolution(6, 3, norm=norm).double()
    theirs = nn.BatchNorm1d(6).double() if norm == "batch_norm" else module.norm
    layout = PackedLayout.from_lengths([4, 0, 7], rows=11 + tail)
    x = torch.randn(11 + tail, 6, dtype=torch.float64, requires_grad=True)
    actual = module(x, layout)[:11]
    weight, bias = module.depthwise.weight[:, None], module.depthwise.bias
    convolved = [
        nn.functional.conv1d(piece.T, weight, bias, padding=1, groups=6).T
        for piece in nn.functional.glu(module.pointwise1(x[:11])).split([4, 7])
    ]
    expected = module.pointwise2(nn.functional.silu(theirs(torch.cat(convolved))))
    torch.testing.assert_close(actual, expected)
    leaves = [x, *(p for name, p in module.named_parameters() if "norm" not in name)]
    torch.testing.assert_close(
        torch.autograd.grad(actual.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
    )
    if norm == "batch_norm":
        torch.testing.assert_close(module.norm.running_mean, theirs.running_mean)
        torch.testing.assert_close(module.norm.running_var, theirs.running_var)


def test_biases_can_be_left_out():
    module = ConformerConvolution(6, 3, norm="layer_norm", bias=False)
    names = {name for name, _ in module.named_parameters() if "norm" not in name}
    assert names == {"pointwise1.weight", "depthwise.weight", "pointwise2.weight"}


LENGTHS, TAIL, CHANNELS = (7, 0, 1, 12), 5, 6


def layout_of(tail=TAIL):
    return PackedLayout.from_lengths(LENGTHS, rows=sum(LENGTHS) + tail)


def pair(dtype=torch.float32):
    torch.manual_seed(0)
    theirs = nn.BatchNorm1d(CHANNELS).to(dtype)
    nn.init.normal_(theirs.weight)
    nn.init.normal_(theirs.bias)
    ours = BatchNorm(CHANNELS).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("tail", [0, TAIL])
def test_training_is_that_of_torch_over_the_real_rows(tail, given):
    ours, theirs = pair(torch.float64)
    layout = layout_of(tail)
    for _ in range(3):
        x = torch.randn(layout.rows, CHANNELS, dtype=torch.float64) * 2 + 1
        x[layout.total :] = torch.nan
        x.requires_grad_()
        real = x[: layout.total].detach().clone().requires_grad_()
        dy = torch.randn_like(real)
        statistics = (real.detach().mean(0), real.detach().var(0, correction=0))
        y, expected = ours(x, layout, statistics if given else None), theirs(real)
        torch.testing.assert_close(y[: layout.total], expected)
        assert torch.isfinite(y).all()
        ours.zero_grad()
        theirs.zero_grad()
        y[: layout.total].backward(dy)
        expected.backward(dy)
        torch.testing.assert_close(x.grad[: layout.total], real.grad)
        assert not x.grad[layout.total :].any()
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
        torch.testing.assert_close(ours.bias.grad, theirs.bias.grad)
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer, msg=name)


def test_half_precision_sums_in_float32():
    ours, theirs = pair()
    layout = layout_of()
    x = (torch.randn(layout.rows, CHANNELS) + 100).bfloat16()
    y = ours(x, layout)
    assert y.dtype == torch.bfloat16
    expected = theirs(x[: layout.total].float())
    torch.testing.assert_close(y[: layout.total].float(), expected, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)


def test_a_batch_without_a_real_row_teaches_nothing():
    ours, _ = pair()
    layout = PackedLayout.from_lengths([0, 0], rows=4)
    x = torch.randn(4, CHANNELS, requires_grad=True)
    y = ours(x, layout)
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert not x.grad.any()
    assert not ours.running_mean.any()
    assert torch.equal(ours.running_var, torch.ones(CHANNELS))
