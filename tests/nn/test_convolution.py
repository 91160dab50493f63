"""The Conformer's convolution module, and its batch normalisation, against torch's."""

import pytest
import torch
from torch import nn

from effasr.nn.convolution import ConformerConvolution
from effasr_kernels import PackedLayout


@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm"])
def test_it_is_the_layers_of_torch_on_each_sequence(norm, tail):
    torch.manual_seed(0)
    module = ConformerConvolution(6, 3, norm=norm).double()
    for parameter in module.norm.parameters():
        nn.init.normal_(parameter)
    theirs = nn.BatchNorm1d(6).double() if norm == "batch_norm" else module.norm
    theirs.load_state_dict(module.norm.state_dict())
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
        torch.autograd.grad(actual.square().sum(), [*leaves, *module.norm.parameters()]),
        torch.autograd.grad(expected.square().sum(), [*leaves, *theirs.parameters()]),
    )
    if norm == "batch_norm":
        torch.testing.assert_close(module.norm.running_mean, theirs.running_mean)
        torch.testing.assert_close(module.norm.running_var, theirs.running_var)


def test_biases_can_be_left_out():
    module = ConformerConvolution(6, 3, norm="layer_norm", bias=False)
    names = {name for name, _ in module.named_parameters() if "norm" not in name}
    assert names == {"pointwise1.weight", "depthwise.weight", "pointwise2.weight"}
