"""Deferred partial sums of gradients: one launch adds the sums of a whole layer.

Each program of a backward writes a partial sum of the gradients of parameters. The backward of an
operation adds them in a separate launch, unless the node of autograd that receives the gradients
takes partial sums: it has an attribute ``partial_sums``, a list. Then the partial sums of every
gradient are appended to the list, autograd gets None as the gradient, and the node adds up what the
list holds when its own backward runs, which is after all that it waits for. So no tensor is ever
visible before its sum is known, however often a parameter is used and whatever hooks read.

A tensor with a row for each frame counts as partial sums, too, if the node's backward follows soon
enough to keep the tensor: the node then has the attribute ``takes_rows``, which is true. A kernel
that writes such a gradient may add up its rows in the same pass, and keep the partial sums with it:
they are the gradient of the bias of the linear layer before, which need not read the rows again.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_here = threading.local()


@dataclass(frozen=True, slots=True, eq=False)
class PartialSums:
    """Partial sums of one launch."""

    partials: Tensor  # (P, ...), contiguous, C columns; float32 if partial sums
    out: Tensor  # where `run` writes the sums of the first columns
    last: Tensor | None  # receives the other columns' sums, if of another dtype
    run: Callable[[], object]  # launches the addition

    @property
    def columns(self) -> int:
        return self.out.numel() + (0 if self.last is None else self.last.numel())

    @property
    def exact(self) -> int:
        """Number of columns with float32 sums; sums of later columns are rounded to `narrow`."""
        if self.out.dtype != torch.float32:
            return 0
        is_all = self.last is None or self.last.dtype == torch.float32
        return self.columns if is_all else self.out.numel()

    @property
    def narrow(self) -> torch.dtype | None:
        """The dtype to which sums are rounded; None if all are float32."""
        dtypes = {x.dtype for x in (self.out, self.last) if x is not None} - {torch.float32}
        return next(iter(dtypes), None)

    @property
    def may_wait(self) -> bool:
        """Whether the dtypes are such that `exact` and `narrow` describe them."""
        if self.last is None or self.out.dtype == torch.float32:
            return True
        return self.last.dtype == self.out.dtype

    def column_of(self, gradient: Tensor) -> int | None:
        """Return the first column of a gradient that lies in ``out`` or ``last``, else None."""
        storage, begin = gradient.untyped_storage()._cdata, 0
        for target in (self.out, self.last):
            if target is None:
                continue
            if target.untyped_storage()._cdata == storage:
                return begin + int(gradient.storage_offset()) - int(target.storage_offset())
            begin += target.numel()
        return None


@dataclass(frozen=True, slots=True)
class Share:
    """A gradient among the columns of partial sums."""

    index: int  # index of the gradient among those that the node receives
    sums: PartialSums  # the partial sums
    column: int  # the first of its columns


def wait(sums: PartialSums) -> bool:
    """Let partial sums wait if the backward that is running allows it; return whether they do."""
    waiting = getattr(_here, "waiting", None)
    if waiting is None or not sums.may_wait:
        return False
    waiting.append(sums)
    return True


@contextmanager
def waiting(*, is_allowed: bool = True) -> Iterator[list[PartialSums]]:
    """Let partial sums wait inside the context, in the list that it yields, if that is allowed."""
    previous = getattr(_here, "waiting", None)
    sums: list[PartialSums] = []
    _here.waiting = sums if is_allowed else None
    try:
        yield sums
    finally:
        _here.waiting = previous


def keep_with(gradient: Tensor, sums: PartialSums) -> None:
    """Keep the partial sums of the rows of a gradient with it, for `take_from`."""
    gradient._sums_of_rows = sums, gradient._version  # type: ignore[attr-defined]


def take_from(gradient: Tensor) -> PartialSums | None:
    """Return, once, what is kept with a gradient; None if it has been changed since."""
    sums, version = vars(gradient).pop("_sums_of_rows", (None, 0))
    return sums if version == gradient._version else None


def takes_rows(tensor: Tensor) -> bool:
    """Return whether a tensor's gradient goes to a node that takes rows."""
    return bool(getattr(tensor.grad_fn, "takes_rows", False))


def receivers(ctx: Any, names: list[str]) -> dict[str, tuple[list[Share], int]]:
    """By name, the list of partial sums and the index there of gradients whose node takes them."""
    by_name = {}
    for name, (node, index) in zip(names, ctx.next_functions, strict=True):
        shares = getattr(node, "partial_sums", None)
        # A gradient of other tensors only may pass the node by; it would keep what it was given.
        if isinstance(shares, list) and torch._C._will_engine_execute_node(node):
            by_name[name] = (shares, index)
    return by_name


def hand_over(
    waiting: list[PartialSums],  # the partial sums that wait
    gradients: dict[str, Tensor | None],  # required, by name; those handed over become None
    to: dict[str, tuple[list[Share], int]],
) -> None:
    """Give partial sums to the nodes that take them, and add up all others."""
    for sums in waiting:
        columns: dict[str, int] = {}
        for name, gradient in gradients.items():
            if gradient is not None and (column := sums.column_of(gradient)) is not None:
                columns[name] = column
        if not all(name in to and _is_plain(gradients[name]) for name in columns):
            sums.run()
            continue
        for name, column in columns.items():
            shares, index = to[name]
            shares.append(Share(index, sums, column))
            gradients[name] = None


def _is_plain(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.is_contiguous()
