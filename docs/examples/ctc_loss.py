import torch

from effasr_kernels import PackedLayout, ctc_loss

frames, labels = PackedLayout.from_lengths([12, 9]), PackedLayout.from_lengths([3, 2])
hidden = torch.randn(21, 32, requires_grad=True)
weight = torch.randn(10, 32, requires_grad=True)  # 9 classes and the blank
targets = torch.tensor([1, 2, 2, 5, 7])

losses = ctc_loss(hidden, weight, targets, frames, labels, blank_id=0)  # (2,), one per utterance
losses.sum().backward()

# The first utterance with PyTorch's own loss, from stored logits.
logits = (hidden[:12] @ weight.T).log_softmax(-1)[:, None]
expected = torch.nn.functional.ctc_loss(
    logits, targets[None, :3], torch.tensor([12]), torch.tensor([3]), blank=0, reduction="none"
)
torch.testing.assert_close(losses[:1], expected)
