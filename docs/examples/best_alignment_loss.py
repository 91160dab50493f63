import torch

from effasr_kernels import PackedLayout, best_alignment_loss

speech, text = PackedLayout.from_lengths([10, 20]), PackedLayout.from_lengths([2, 4])
x, y = (torch.randn(layout.rows, 8, requires_grad=True) for layout in (speech, text))

losses = best_alignment_loss(x, y, speech, text)  # (2,)
losses.sum().backward()

# Speech that repeats the rows of the text has distance 0, however long it is.
repeats = torch.tensor([3, 7, 5, 5, 1, 9])
repeated = y.detach().repeat_interleave(repeats, 0)
zero = best_alignment_loss(repeated, y, speech, text)
torch.testing.assert_close(zero, torch.zeros(2))
