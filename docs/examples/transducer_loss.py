import torch

from effasr_kernels import PackedLayout, transducer_loss

frames, labels = PackedLayout.from_lengths([6, 4]), PackedLayout.from_lengths([2, 1])
encoded = torch.randn(10, 16, requires_grad=True)  # f, a row per frame
predicted = torch.randn(5, 16, requires_grad=True)  # g, a row per label and one before the first
weight, bias = torch.randn(8, 16, requires_grad=True), torch.zeros(8)
targets = torch.tensor([3, 1, 4])

losses = transducer_loss(
    encoded, predicted, targets, frames, labels, weight, bias, blank_id=0
)  # (2,), one per utterance
losses.sum().backward()
assert encoded.grad.shape == encoded.shape

# A token-and-duration transducer (TDT): the last rows of the weight score durations of 0, 1 and 2.
weight, bias = torch.randn(8 + 3, 16), torch.zeros(8 + 3)
with_durations = transducer_loss(
    encoded, predicted, targets, frames, labels, weight, bias, blank_id=0, durations=(0, 1, 2)
)
assert with_durations.isfinite().all()
