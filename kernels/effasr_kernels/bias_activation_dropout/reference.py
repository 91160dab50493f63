"""Reference implementation of `bias_activation_dropout`, which all other backends must match."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels.bias_activation_dropout import ActivationArguments
from effasr_kernels.shared.dropout import kept_elements
from effasr_kernels.shared.ragged import widen


def run(a: ActivationArguments) -> Tensor:
    """See `effasr_kernels.bias_activation_dropout.bias_activation_dropout`."""
    total, rows = a.layout.total, a.layout.rows
    # Slice only if needed, because the gradient of a slice is a copy.
    y = widen(a.x if total == rows else a.x[:total])
    if a.bias is not None:
        y = y + widen(a.bias)
    y = getattr(F, a.activation)(y)
    if a.dropout:
        keep = kept_elements(a.seed, y.shape, a.dropout, a.offset).to(y.device)
        y = torch.where(keep, y, 0) / (1 - a.dropout)
    y = y.to(a.x.dtype)
    return y if total == rows else F.pad(y, (0, 0, 0, rows - total))
