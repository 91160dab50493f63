import pytest
import torch
from torch import nn

from effasr.nn.convolution import ConformerConvolution
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
