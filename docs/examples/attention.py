import torch
from torch.nn.functional import scaled_dot_product_attention

from effasr_kernels import PackedLayout, Rotary, attention

# Two utterances of 5 and 3 frames, 4 heads of width 16, end to end in one tensor.
layout = PackedLayout.from_lengths([5, 3])
q, k, v = (torch.randn(8, 4, 16, requires_grad=True) for _ in range(3))

y = attention(q, k, v, layout, causal=True)  # (8, 4, 16)
y.square().sum().backward()

# The second utterance attends to its own frames alone.
own = [x[5:8].transpose(0, 1) for x in (q, k, v)]  # (heads, frames, width)
expected = scaled_dot_product_attention(*own, is_causal=True).transpose(0, 1)
torch.testing.assert_close(y[5:8], expected)

# Rotary positions, and attention from text (2 and 4 tokens) to the same speech.
text = PackedLayout.from_lengths([2, 4])
assert attention(q, k, v, layout, position=Rotary()).shape == (8, 4, 16)
assert attention(torch.randn(6, 4, 16), k, v, text, layout).shape == (6, 4, 16)
