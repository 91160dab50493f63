import torch
from torch.nn.functional import conv2d

from effasr_kernels import PackedLayout, strided_depthwise

# Two utterances of 8 and 4 rows, 6 bands and 5 channels: half the rows and half the bands.
layout, lengths = PackedLayout.from_lengths([4, 2]), torch.tensor([8, 4])
x = torch.randn(12, 6, 5, requires_grad=True)
weight, bias = torch.randn(5, 9, requires_grad=True), torch.zeros(5)

y = strided_depthwise(x, weight, bias, layout, lengths)  # (6, 3, 5)
y.sum().backward()

own = x[8:].permute(2, 0, 1)[None]  # (1, channels, rows, bands)
expected = conv2d(own, weight.view(5, 1, 3, 3), stride=2, padding=1, groups=5)
torch.testing.assert_close(y[4:], expected[0].permute(1, 2, 0))
