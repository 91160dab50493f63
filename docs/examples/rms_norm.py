import torch

from effasr_kernels import rms_norm

x = torch.randn(6, 16, requires_grad=True)
weight = torch.ones(16, requires_grad=True)

y = rms_norm(x, weight, eps=1e-6)
y.sum().backward()
torch.testing.assert_close(y.square().mean(1), torch.ones(6))

# Each head of queries (T, H, D), in any order in memory; the weight counts from 1, as in Gemma.
heads, weight = torch.randn(6, 4, 8).transpose(0, 1), torch.zeros(8)
y = rms_norm(heads, weight, eps=1e-6, offset=1)
torch.testing.assert_close(y, torch.nn.functional.rms_norm(heads, (8,), eps=1e-6))
