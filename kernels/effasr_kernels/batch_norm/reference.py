import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels.batch_norm import BatchNormArguments
from effasr_kernels.runtime.dispatch import Gradients, Tensors
from effasr_kernels.shared.ragged import real_rows, wide_dtype, widen


def forward(a: BatchNormArguments) -> tuple[tuple[Tensor], tuple[Tensor]]:
    """Saves the normalized values in a wide dtype."""
    padded_normal, normal = _with_tail(a)
    torch.sub(widen(real_rows(a.x, a.layout)), _like(a.mean, normal), out=normal)
    normal *= _rstd(a)
    padded_y, y = _with_tail(a)
    torch.addcmul(_like(a.bias, normal), normal, _like(a.weight, normal), out=y)
    if a.silu:
        F.silu(y, inplace=True)
    return (padded_y.to(a.x.dtype),), (padded_normal,)


def saved_like(a: BatchNormArguments) -> tuple[Tensor]:
    return (a.x.new_empty(a.x.shape, dtype=wide_dtype(a.x)),)


def backward(a: BatchNormArguments, grads: Tensors, results: Tensors, saved: Tensors) -> Gradients:
    normal, dy = real_rows(saved[0], a.layout), widen(real_rows(grads[0], a.layout))
    weight = _like(a.weight, normal)
    if a.silu:
        z = torch.addcmul(_like(a.bias, normal), normal, weight)
        dy = torch.ops.aten.silu_backward(dy, z)
    dweight, dbias = (dy * normal).sum(0), dy.sum(0)
    padded_dx, dx = _with_tail(a)
    if a.fixed:
        torch.mul(dy, weight * _rstd(a), out=dx)
    else:
        count = max(normal.shape[0], 1)
        torch.addcmul(dbias / -count, normal, dweight / -count, out=dx).add_(dy)
        dx *= weight * _rstd(a)
    return {
        "x": padded_dx.to(a.x.dtype),
        "weight": dweight.to(a.weight.dtype),
        "bias": dbias.to(a.bias.dtype),
        "mean": None,
        "variance": None,
    }


def _with_tail(a: BatchNormArguments) -> tuple[Tensor, Tensor]:
    """Return an empty wide tensor like x with zeros in the tail, and its other rows."""
    padded = a.x.new_empty(a.x.shape, dtype=wide_dtype(a.x))
    padded[a.layout.total :] = 0
    return padded, padded[: a.layout.total]


def _like(parameter: Tensor, x: Tensor) -> Tensor:
    return parameter.to(x.dtype)


def _rstd(a: BatchNormArguments) -> Tensor:
    return (a.variance.to(wide_dtype(a.x)) + a.eps).rsqrt()
