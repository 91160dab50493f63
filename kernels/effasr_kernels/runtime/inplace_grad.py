"""Gradients that are written in place, over the arguments that they belong to.

The backward of an operation with an argument ``overwritten`` (names of tensors) may write the
gradient of each of these tensors over the tensor itself. It increments the tensor's version, so
that autograd raises an error in a backward that still needs the old values, as after any in-place
operation.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.graph import increment_version

from effasr_kernels.runtime.checks import wrong


def check_overwritable(op: str, option: str, names: Sequence[str], **tensors: Tensor) -> None:
    """Check that gradients can be written over the tensors of these names."""
    # They must be no leaf or view of one (a parameter or the caller's data), contiguous, and share
    # no memory with another argument.
    for name in names:
        x = tensors[name]
        base = x._base if x._is_view() else None
        if x.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
            rule = f"be what an operation made, not a leaf, where `{option}` is set"
            raise wrong(op, name, rule, "a leaf or a view of one: its values would be lost")
        if not x.is_contiguous():
            rule = f"be contiguous where `{option}` is set"
            raise wrong(op, name, rule, f"{tuple(x.shape)} with strides {x.stride()}")
    for name_a, name_b in combinations(tensors, 2):
        if (name_a in names or name_b in names) and _overlap(tensors[name_a], tensors[name_b]):
            rule = f"have memory of its own where `{option}` is set"
            raise wrong(
                op, name_a if name_a in names else name_b, rule, f"`{name_a}` and `{name_b}` in one"
            )


def begin(ctx: Any, op: str, names: Sequence[str]) -> None:
    """Raise an error for a second backward, clearer than autograd's error about versions."""
    if names and getattr(ctx, "is_spent", False):
        written = " and ".join(f"`{name}`" for name in names)
        raise RuntimeError(
            f"{op}: there is no second backward where gradients are written over the inputs: the "
            f"first has replaced {written}. Leave that option out to use `retain_graph=True`."
        )
    ctx.is_spent = True


def finish(x: Tensor) -> Tensor:
    """Increment the version of ``x``, which now holds its own gradient, and return the gradient."""
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
    """The byte range of a tensor in its storage: first, and one past the last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    begin = int(x.storage_offset()) * x.element_size()
    return begin, begin + (last + 1) * x.element_size()
