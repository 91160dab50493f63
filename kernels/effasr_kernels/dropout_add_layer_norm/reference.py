import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels.dropout_add_layer_norm import NormArguments
from effasr_kernels.shared.dropout import kept_elements
from effasr_kernels.shared.ragged import real_rows, widen, with_tail


def run(a: NormArguments) -> tuple[Tensor, Tensor]:
    none = a.residual.new_empty(0)
    summed = real_rows(a.residual, a.layout)
    if a.x is not None:
        x = widen(real_rows(a.x, a.layout))
        if a.x_bias is not None:
            x = x + widen(a.x_bias)
        if a.dropout:
            keep = kept_elements(a.seed, x.shape, a.dropout, a.offset).to(x.device)
            x = torch.where(keep, x, 0) / (1 - a.dropout)
        summed = torch.add(widen(summed), x, alpha=a.scale).to(a.residual.dtype)
    normed = none
    if a.weight is not None and a.bias is not None:
        shape = a.residual.shape[1:]
        normed = F.layer_norm(widen(summed), shape, widen(a.weight), widen(a.bias), a.eps)
        normed = with_tail(normed.to(a.normed_dtype), a.layout)
    if not a.prenorm:
        return normed, none
    return normed, a.residual if a.x is None else with_tail(summed, a.layout)
