import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from effasr_kernels.linear_cross_entropy import CrossEntropyArguments
from effasr_kernels.runtime.checks import check_labels
from effasr_kernels.shared.ragged import widen

_LARGEST = 2**24
"""Maximum number of logits computed at a time: 64 MiB in float32."""


def run(a: CrossEntropyArguments) -> Tensor:
    # Ignored rows are removed rather than multiplied by zero, because they may contain NaN.
    counted = (a.targets != a.ignore_index).nonzero().squeeze(1)
    rows = widen(a.hidden).index_select(0, counted)
    labels = a.targets.index_select(0, counted).long()
    check_labels("linear_cross_entropy", labels, a.weight.shape[0], f" or be {a.ignore_index}")
    weight, bias = widen(a.weight), None if a.bias is None else widen(a.bias)
    step = max(1, _LARGEST // max(1, weight.shape[0]))
    settings = weight, bias, a.label_smoothing, a.z_loss
    if rows.shape[0] <= step:
        losses = _losses(rows, labels, *settings)
    else:
        # Checkpointed, so that in the backward too only one chunk of logits exists at a time.
        pairs = zip(rows.split(step), labels.split(step), strict=True)
        losses = torch.cat(
            [checkpoint(_losses, *pair, *settings, use_reentrant=False) for pair in pairs]
        )
    return losses.new_zeros(a.hidden.shape[0]).index_copy(0, counted, losses)


def _losses(
    rows: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    logits = F.linear(rows, weight, bias)
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    return losses + z_loss * logits.logsumexp(-1).square() if z_loss else losses
