import torch

from effasr_kernels import projected_top_k

hidden, weight = torch.randn(3, 32), torch.randn(100, 32)

log_probabilities, classes = projected_top_k(hidden, weight, k=4)  # (3, 4) each, the best first

expected = (hidden @ weight.T).log_softmax(-1).topk(4)
torch.testing.assert_close(log_probabilities, expected.values)
assert classes.equal(expected.indices)
