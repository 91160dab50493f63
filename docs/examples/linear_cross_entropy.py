import torch
from torch.nn.functional import cross_entropy

from effasr_kernels import linear_cross_entropy

hidden = torch.randn(6, 32, requires_grad=True)  # 6 packed tokens
weight = torch.randn(100, 32, requires_grad=True)  # a vocabulary of 100
targets = torch.tensor([3, 14, 15, 92, 65, -100])  # -100: no target, such as a prompt

losses = linear_cross_entropy(hidden, weight, targets, label_smoothing=0.1)  # (6,)
losses.sum().backward()

expected = cross_entropy(hidden @ weight.T, targets, label_smoothing=0.1, reduction="none")
torch.testing.assert_close(losses, expected)
assert losses[5] == 0
