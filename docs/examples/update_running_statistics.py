import torch

from effasr_kernels import PackedLayout, update_running_statistics

layout = PackedLayout.from_lengths([7, 4])
x = torch.randn(11, 8)
running_mean, running_variance, num_batches = torch.zeros(8), torch.ones(8), torch.tensor(0)

mean, variance = x.mean(0), x.var(0, correction=0)
update_running_statistics(running_mean, running_variance, num_batches, mean, variance, layout)

norm = torch.nn.BatchNorm1d(8)
norm(x)
torch.testing.assert_close(running_mean, norm.running_mean)
torch.testing.assert_close(running_variance, norm.running_var)
