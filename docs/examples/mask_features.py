import torch

from effasr_kernels import PackedLayout, mask_features

layout = PackedLayout.from_lengths([3, 2])
x, lengths = torch.ones(5 * 8, 80), torch.tensor([24, 11])

freq_shares, time_shares = torch.rand(2, 2, 2), torch.rand(2, 2, 1)
y = mask_features(
    x,
    lengths,
    layout,
    rows_per_slot=8,
    freq_shares=freq_shares,
    freq_width=27,
    time_shares=time_shares,
    time_width=0.2,
)
hidden = y == 0
# Rows between the stretches have the same hidden channels.
assert (hidden[24:] == hidden[39]).all(1).sum() >= 14
