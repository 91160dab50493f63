import torch
from torch.nn.functional import silu

from effasr_kernels import PackedLayout, batch_norm

# Statistics of the rows, as depthwise_conv with statistics=True returns them.
layout = PackedLayout.from_lengths([7, 4])
x = torch.randn(11, 8, requires_grad=True)
mean, variance = x.detach().mean(0), x.detach().var(0, correction=0)
weight, bias = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)

y = batch_norm(x, weight, bias, mean, variance, layout, silu=True)  # (11, 8)
y.square().sum().backward()

norm = torch.nn.BatchNorm1d(8)
norm.weight.data, norm.bias.data = weight.data, bias.data
torch.testing.assert_close(y, silu(norm(x)))
