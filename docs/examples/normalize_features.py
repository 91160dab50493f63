import torch

from effasr_kernels import PackedLayout, normalize_features

layout = PackedLayout.from_lengths([3, 2])
x, lengths = torch.randn(5 * 8, 80), torch.tensor([24, 11])

y = normalize_features(x, lengths, layout, rows_per_slot=8)
torch.testing.assert_close(y[24:35].mean(0), torch.zeros(80), atol=1e-5, rtol=0)
torch.testing.assert_close(y[24:35].std(0), torch.ones(80), atol=1e-3, rtol=0)
assert not y[35:].any()
