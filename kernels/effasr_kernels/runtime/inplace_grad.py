"""Gradients that are written over the memory of the arguments that they belong to.

An operation with an argument ``overwritten``, the names of tensors, may write the gradient of each
over the tensor itself, in its backward. Autograd is told: the tensor's version counts up, so that a
backward which still needs its values is an error, as after any operation in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.graph import increment_version

from effasr_kernels.runtime.checks import wrong


def check_overwritable(op: str, option: str, names: Sequence[str], **tensors: Tensor) -> None:
    """Check that gradients can be written over some of the arguments.

    Args:
        op: The operation, for the message.
        option: The argument that asks for it, for the message.
        names: Which of the tensors.
        tensors: All of them, as no two may share memory.

    Raises:
        ValueError: One of these is a leaf, or a view of one, whose values are a parameter's or the
            user's; it is not contiguous; or it overlaps with another argument.
    """
    for name in names:
        x = tensors[name]
        base = x._base if x._is_view() else None
        if x.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
            rule = f"be what an operation made, not a leaf, where `{option}` is set"
            raise wrong(op, name, rule, "a leaf or a view of one: its values would be lost")
        if not x.is_contiguous():
            rule = f"be contiguous where `{option}` is set"
            raise wrong(op, name, rule, f"{tuple(x.shape)} with strides {x.stride()}")
    for one, other in combinations(tensors, 2):
        if (one in names or other in names) and _overlap(tensors[one], tensors[other]):
            rule = f"have memory of its own where `{option}` is set"
            raise wrong(op, one if one in names else other, rule, f"`{one}` and `{other}` in one")


def begin(ctx: Any, op: str, names: Sequence[str]) -> None:
    """Refuse a second backward, before autograd finds that saved tensors have changed.

    Raises:
        RuntimeError: It is the second.
    """
    if names and getattr(ctx, "is_spent", False):
        written = " and ".join(f"`{name}`" for name in names)
        raise RuntimeError(
            f"{op}: there is no second backward where gradients are written over the inputs: the "
            f"first has replaced {written}. Leave that option out to use `retain_graph=True`."
        )
    ctx.is_spent = True


def finish(x: Tensor) -> Tensor:
    """Tell autograd that ``x`` holds its gradient from now on, and return that."""
    increment_version(x)
    return x.detach()


def _overlap(x: Tensor, y: Tensor) -> bool:
    if is_fake(x) or not x.numel() or not y.numel():
        return False
    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return False
    (x_begin, x_end), (y_begin, y_end) = _extent(x), _extent(y)
    return x_begin < y_end and y_begin < x_end


def _extent(x: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after the last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    begin = int(x.storage_offset()) * x.element_size()
    return begin, begin + (last + 1) * x.element_size()
