import torch
from torch.nn.functional import conv1d

from effasr_kernels import PackedLayout, depthwise_conv

layout = PackedLayout.from_lengths([7, 4])
x = torch.randn(11, 8, requires_grad=True)
weight = torch.randn(8, 3, requires_grad=True)  # 3 taps for each of 8 channels

y = depthwise_conv(x, weight, layout)  # (11, 8)
y.sum().backward()

# The second utterance by itself: the first one does not leak into it.
expected = conv1d(x[7:].T, weight[:, None], padding=1, groups=8).T
torch.testing.assert_close(y[7:], expected)

# With the gate of a Conformer (GLU), and what batch normalisation needs to know.
y, mean, variance = depthwise_conv(torch.randn(11, 16), weight, layout, gated=True, statistics=True)
torch.testing.assert_close(mean, y.mean(0))
torch.testing.assert_close(variance, y.var(0, correction=0))
