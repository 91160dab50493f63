import torch
from torch.nn.functional import silu

from effasr_kernels import gated_activation

# One product for gates and values: its halves are read where they are.
product = torch.randn(6, 32, requires_grad=True)
gate, up = product.chunk(2, dim=-1)

y = gated_activation(gate, up, activation="silu")
y.sum().backward()
torch.testing.assert_close(y, silu(gate) * up)
