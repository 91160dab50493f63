import torch

from effasr_kernels import PackedLayout, attention, guided_attention

text, speech = PackedLayout.from_lengths([2, 4]), PackedLayout.from_lengths([10, 20])
q = torch.randn(6, 4, 16, requires_grad=True)
k, v = (torch.randn(30, 4, 16, requires_grad=True) for _ in range(2))

y, penalty = guided_attention(q, k, v, text, speech, sigma=0.4)  # (6, 4, 16), (6, 4)
(y.square().sum() + 2.0 * penalty.mean()).backward()

# The output is that of attention; the penalty is small near the diagonal, and below 1.
torch.testing.assert_close(y, attention(q, k, v, text, speech))
assert 0 <= penalty.min() <= penalty.max() < 1
