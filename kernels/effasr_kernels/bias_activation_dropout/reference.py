import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels.bias_activation_dropout import ActivationArguments
from effasr_kernels.shared.dropout import kept_elements
from effasr_kernels.shared.ragged import real_rows, widen, with_tail


def run(a: ActivationArguments) -> Tensor:
    y = widen(real_rows(a.x, a.layout))
    if a.bias is not None:
        y = y + widen(a.bias)
    y = getattr(F, a.activation)(y)
    if a.dropout:
        keep = kept_elements(a.seed, y.shape, a.dropout, a.offset).to(y.device)
        y = torch.where(keep, y, 0) / (1 - a.dropout)
    return with_tail(y.to(a.x.dtype), a.layout)
