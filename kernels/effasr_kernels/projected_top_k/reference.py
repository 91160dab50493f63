import torch.nn.functional as F
from torch import Tensor

from effasr_kernels.projected_top_k import TopKArguments
from effasr_kernels.shared.ragged import widen

_TILE = 16
"""Rows are padded to a multiple of this; MKL uses other routines for fewer than 4 (8 threaded)."""


def run(a: TopKArguments) -> tuple[Tensor, Tensor]:
    count = a.hidden.shape[0]
    rows = F.pad(widen(a.hidden), (0, 0, 0, -count % _TILE))
    bias = None if a.bias is None else widen(a.bias[: a.classes])
    logits = F.linear(rows, widen(a.weight[: a.classes]), bias)[:count]
    # Selected by logits, because differences may be lost by rounding the log-probabilities.
    indices = _best(logits, a.k)
    return logits.log_softmax(-1).gather(-1, indices), indices


def _best(logits: Tensor, k: int) -> Tensor:
    """Return the classes of the k largest logits of each row, equal logits in order of class."""
    if k == 1:
        return logits.argmax(-1, keepdim=True)
    indices = logits.topk(k).indices.sort().values
    values, order = logits.gather(-1, indices).sort(descending=True, stable=True)
    indices = indices.gather(-1, order)
    # `topk` breaks ties arbitrarily. Rows where more than k logits reach the k-th value are sorted.
    tied = ((logits >= values[:, -1:]).sum(-1) != k).nonzero().squeeze(1)
    if tied.numel():
        indices[tied] = logits[tied].sort(descending=True, stable=True).indices[:, :k]
    return indices
