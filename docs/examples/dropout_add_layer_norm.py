import torch
from torch.nn.functional import layer_norm

from effasr_kernels import PackedLayout, dropout_add_layer_norm

# The stream of two utterances, the output of a module, and the norm before the next module.
layout = PackedLayout.from_lengths([4, 2])
stream, output = (torch.randn(6, 8, requires_grad=True) for _ in range(2))
weight, bias = torch.ones(8, requires_grad=True), torch.zeros(8, requires_grad=True)

normed, added = dropout_add_layer_norm(output, stream, weight, bias, layout, scale=0.5)
(normed.sum() + added.sum()).backward()

torch.testing.assert_close(added, stream + 0.5 * output)
torch.testing.assert_close(normed, layer_norm(added, (8,), weight, bias))

# The same seed and offset drop the same elements, also in the backward.
options = {"dropout": 0.1, "seed": 3, "offset": 1}
first = dropout_add_layer_norm(output, stream, None, None, layout, **options)
assert torch.equal(first, dropout_add_layer_norm(output, stream, None, None, layout, **options))
