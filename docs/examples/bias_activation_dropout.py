import torch
from torch.nn.functional import silu

from effasr_kernels import PackedLayout, bias_activation_dropout

# The inner rows of a feed-forward network, from a product without its bias.
layout = PackedLayout.from_lengths([4, 2])
x, bias = torch.randn(6, 16, requires_grad=True), torch.randn(16, requires_grad=True)

y = bias_activation_dropout(x, bias, layout, activation="silu", dropout=0.1)
y.sum().backward()
assert torch.equal(x.grad == 0, y == 0)  # what the forward drops, the backward drops

y = bias_activation_dropout(x, bias, layout, activation="silu")
torch.testing.assert_close(y, silu(x + bias))
