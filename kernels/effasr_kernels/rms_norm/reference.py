import torch
from torch import Tensor

from effasr_kernels.rms_norm import RMSNormArguments
from effasr_kernels.shared.ragged import widen


def run(a: RMSNormArguments) -> Tensor:
    x, weight = widen(a.x), widen(a.weight)
    normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + a.eps)
    if a.offset:
        return ((a.offset + weight) * normal).to(a.result_dtype)
    return (weight * widen(normal.to(a.x.dtype))).to(a.result_dtype)
