"""Queries, keys and values of one product, and their gradients in one buffer.

A product makes the parts as one tensor (T, P, H, D), of which `unbind_parts` returns views. The
backward of `torch.unbind` would copy the gradients of the parts into a tensor of that shape. Here
kernels write them there: `empty_gradients` allocates the gradients of such parts as views of one
tensor, which the backward of `unbind_parts` returns without a copy.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def unbind_parts(x: Tensor) -> tuple[Tensor, ...]:
    """Return the parts of (T, P, H, D), as ``x.unbind(1)`` does: P views, (T, H, D)."""
    return _Unbind.apply(x)  # type: ignore[return-value]


def empty_gradients(*parts: Tensor) -> list[Tensor]:
    """Allocate a gradient for each of several tensors, (T, H, D), of one dtype."""
    # If the tensors are adjacent parts of one tensor, as from `unbind_parts`, so are the gradients;
    # otherwise each is contiguous. In both cases the strides of heads and channels are D and 1.
    if _joined(parts) is None:
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in parts]
    rows, heads, width = parts[0].shape
    return list(parts[0].new_empty(rows, len(parts), heads, width).unbind(1))


class _Unbind(torch.autograd.Function):
    """`torch.unbind`, without copies in the backward if the gradients are parts of one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        return x.unbind(1)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Tensor:
        joint = _joined(grads)
        return torch.stack(grads, 1) if joint is None else joint


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the (T, P, H, D) that the tensors divide in order, or None."""
    first, count = parts[0], len(parts)
    if first.ndim != 3 or not first.numel():
        return None
    rows, heads, width = first.shape
    size = heads * width
    strides, begin = (count * size, width, 1), int(first.storage_offset())
    storage = first.untyped_storage()._cdata
    for number, part in enumerate(parts):
        if (
            part.shape != first.shape
            or part.dtype != first.dtype
            or part.stride() != strides
            or part.storage_offset() != begin + number * size
            or part.untyped_storage()._cdata != storage
        ):
            return None
    return first.as_strided((rows, count, heads, width), (strides[0], size, width, 1), begin)
