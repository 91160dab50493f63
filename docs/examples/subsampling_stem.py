import torch
from torch.nn.functional import conv2d

from effasr_kernels import PackedLayout, subsampling_stem

# Two utterances of 30 and 15 mel rows of 16 bands: 4 and 2 encoder frames, 8 rows each.
layout, lengths = PackedLayout.from_lengths([4, 2]), torch.tensor([30, 15])
x = torch.randn(8 * 6, 16)
x[30:32] = x[47:] = 0  # rows between an utterance and its last frame's end
weight, depthwise = torch.randn(5, 9), torch.randn(5, 9)  # 5 channels, 3 x 3 taps
bias = torch.zeros(5)

y = subsampling_stem(x, weight, bias, depthwise, bias, layout, lengths)  # (2 * 6, 4, 5)

# The first utterance with two ordinary convolutions of stride 2; rows past its end are masked.
first = conv2d(x[None, None, :30], weight.view(5, 1, 3, 3), stride=2, padding=1).relu()
second = conv2d(first, depthwise.view(5, 1, 3, 3), stride=2, padding=1, groups=5)
torch.testing.assert_close(y[:8], second[0].permute(1, 2, 0))
