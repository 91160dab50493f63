import torch

from effasr_kernels import PackedLayout, grouped_linear

# Rows sorted by the expert that they chose: 5 of the first, none of the second, 3 of the third.
layout = PackedLayout.from_lengths([5, 0, 3])
x = torch.randn(8, 16, requires_grad=True)
weight = torch.randn(3, 32, 16, requires_grad=True)  # 3 experts, 16 channels to 32
bias = torch.randn(3, 32, requires_grad=True)

y = grouped_linear(x, weight, layout, bias=bias)  # (8, 32)
y.sum().backward()

# The last rows by themselves: the other experts do not take part.
expected = torch.nn.functional.linear(x[5:], weight[2], bias[2])
torch.testing.assert_close(y[5:], expected)

# An expert without rows has a zero gradient.
assert weight.grad is not None
assert not weight.grad[1].any()
