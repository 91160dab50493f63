"""The Conformer's convolution module, and its batch normalisation, against torch's."""

import pytest
import torch
from torch import nn

from effasr.nn.convolution import BatchNorm, ConformerConvolution
from effasr_kernels import PackedLayout


@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm"])
def test_a_pack_is_each_sequence_alone(norm):
    torch.manual_seed(0)
    module = ConformerConvolution(8, 5, norm=norm).eval()
    layout = PackedLayout.from_lengths([4, 0, 9, 1], rows=17)
    x = torch.randn(17, 8)
    packed = module(x, layout)[:14].split([4, 0, 9, 1])
    for piece, rows in zip(packed, x[:14].split([4, 0, 9, 1]), strict=True):
        alone = module(rows, PackedLayout.from_lengths([len(rows)]))
        torch.testing.assert_close(piece, alone)


def test_it_is_the_module_of_torch_layers():
    torch.manual_seed(0)
    module = ConformerConvolution(6, 3, norm="layer_norm")
    x = torch.randn(7, 6)
    gated = nn.functional.glu(module.pointwise1(x))
    convolved = nn.functional.conv1d(
        gated.T, module.depthwise.weight[:, None], module.depthwise.bias, padding=1, groups=6
    ).T
    expected = module.pointwise2(nn.functional.silu(module.norm(convolved)))
    actual = module(x, PackedLayout.from_lengths([7]))
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tail", [0, 3])
def test_batch_norm_in_training_is_that_of_torch(tail):
    torch.manual_seed(0)
    module = ConformerConvolution(6, 3, norm="batch_norm").double()
    theirs = nn.BatchNorm1d(6).double()
    layout = PackedLayout.from_lengths([4, 0, 7], rows=11 + tail)
    x = torch.randn(11 + tail, 6, dtype=torch.float64, requires_grad=True)
    actual = module(x, layout)[:11]
    gated = nn.functional.glu(module.pointwise1(x[:11]))
    convolved = torch.cat(
        [
            nn.functional.conv1d(
                piece.T,
                module.depthwise.weight[:, None],
                module.depthwise.bias,
                padding=1,
                groups=6,
            ).T
            for piece in gated.split([4, 7])
        ]
    )
    expected = module.pointwise2(nn.functional.silu(theirs(convolved)))
    torch.testing.assert_close(actual, expected)
    leaves = [x, *(p for name, p in module.named_parameters() if "norm" not in name)]
    torch.testing.assert_close(
        torch.autograd.grad(actual.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
    )
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


def test_evaluation_is_that_of_torch():
    ours, theirs = pair()
    theirs.running_mean.normal_()
    theirs.running_var.uniform_(0.5, 2)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(20, CHANNELS)
    layout = PackedLayout.from_lengths([20])
    torch.testing.assert_close(ours.eval()(x, layout), theirs.eval()(x))


def test_gradients_are_right():
    ours, _ = pair(torch.float64)
    layout = layout_of()
    x = torch.randn(layout.rows, CHANNELS, dtype=torch.float64, requires_grad=True)

    def normalised(x, weight, bias):
        parameters = {"weight": weight, "bias": bias}
        y = torch.func.functional_call(ours, parameters, (x, layout))
        return y[: layout.total]

    inputs = (x, ours.weight.detach().requires_grad_(), ours.bias.detach().requires_grad_())
    assert torch.autograd.gradcheck(normalised, inputs)


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


def test_one_real_row_does_not_divide_by_zero():
    ours, _ = pair()
    layout = PackedLayout.from_lengths([1], rows=3)
    y = ours(torch.randn(3, CHANNELS), layout)
    torch.testing.assert_close(y[0], ours.bias)
    assert torch.isfinite(ours.running_var).all()
