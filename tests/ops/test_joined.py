"""Parts of one product, whose gradients need no copy to be joined."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from effasr_kernels.shared.joined import empty_gradients, unbind_parts

Fill = Callable[[list[Tensor]], list[Tensor]]


class _Ones(torch.autograd.Function):
    """The sum of three tensors, whose gradients a function makes from empty ones."""

    @staticmethod
    def forward(ctx, make, *parts):
        ctx.make = make
        ctx.save_for_backward(*parts)
        return sum(part.sum() for part in parts)

    @staticmethod
    def backward(ctx, dy):
        gradients = ctx.make(empty_gradients(*ctx.saved_tensors))
        for number, gradient in enumerate(gradients):
            gradient.fill_(number + 1)
        return None, *gradients


def _gradient(make: Fill, seen: list[int]) -> Tensor:
    leaf = torch.randn(7, 3, 2, 4, requires_grad=True)
    x = leaf * 1
    x.register_hook(lambda gradient: seen.append(gradient.untyped_storage().data_ptr()))
    _Ones.apply(make, *unbind_parts(x)).backward()
    return leaf.grad


def _keep(seen: list[int]) -> Fill:
    # Kept, because other memory could otherwise get the same address.
    kept: list[Tensor] = []

    def make(gradients: list[Tensor]) -> list[Tensor]:
        kept.append(gradients[0])
        seen.append(gradients[0].untyped_storage().data_ptr())
        return gradients

    return make


@pytest.mark.parametrize("change", ["none", "order", "copy", "contiguous"])
def test_gradients_are_joined_without_a_copy_if_they_are_parts_in_order(change: str) -> None:
    seen: list[int] = []
    keep = _keep(seen)
    changes: dict[str, Fill] = {
        "none": lambda x: x,
        "order": lambda x: x[::-1],
        "copy": lambda x: [x[0], x[1].clone(), x[2]],
        "contiguous": lambda x: [part.contiguous() for part in x],
    }
    gradient = _gradient(lambda x: changes[change](keep(x)), seen)
    assert torch.equal(gradient, torch.arange(1.0, 4.0)[:, None, None].expand(7, 3, 2, 4))
    assert (seen[0] == seen[1]) == (change == "none")


@pytest.mark.parametrize("heads", [1, 3])
def test_other_tensors_have_contiguous_gradients(heads: int) -> None:
    q, k, v = torch.randn(6, 3, heads, 4).unbind(1)
    for parts in ((q, v, k), (k, v), (k, v, v), (q.clone(), k, v), (q[:0], k[:0], v[:0])):
        for gradient, part in zip(empty_gradients(*parts), parts, strict=True):
            assert gradient.shape == part.shape
            assert gradient.is_contiguous()
    last = empty_gradients(*torch.randn(6, 2, heads, 4).unbind(1))
    assert last[0].stride() == (2 * heads * 4, 4, 1)
    assert last[0].untyped_storage().data_ptr() == last[1].untyped_storage().data_ptr()
