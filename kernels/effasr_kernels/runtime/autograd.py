"""Implementations that bring their own backward, as one autograd function for all of them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import inplace_grad
from effasr_kernels.runtime.dispatch import Op


class Flattening(Protocol):
    """What `Kernel` needs to know of its operation: `torch_op.Registered`."""

    op: Op
    arguments: dict[str, Any]
    names: list[str]

    def flat(self, given: Mapping[str, Any]) -> list[Any]:
        """The arguments as tensors and plain values, as `names` calls them."""
        ...

    def restore(self, flat: Sequence[Any]) -> dict[str, Any]:
        """The inverse."""
        ...

    def pack(self, results: tuple[Tensor, ...]) -> Any:
        """One tensor or several, as callers expect."""
        ...


class Kernel:
    """The ``run`` of a module that defines ``forward``, ``saved_like`` and ``backward``.

    Each is called with the arguments of the operation by name:

    ``forward(**arguments) -> (results, saved)``
        Two tuples of tensors: what the operation returns, and what the backward needs besides.
    ``saved_like(**arguments) -> saved``
        Empty tensors like those, also of fake arguments.
    ``backward(grads, results, saved, **arguments) -> dict``
        The gradients by the names that the operation's schema gives to tensors; None is zero, and
        one that is missing cannot be had. ``grads`` has a contiguous tensor for each result. Those
        of tensors that the argument ``overwritten`` names, where an operation has one, are written
        over these tensors.
    """

    def __init__(
        self,
        operation: Flattening,
        module: str,
        forward: Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor, ...]]],
        backward: Callable[..., Mapping[str, Tensor | None]],
    ):
        """Join the parts.

        Args:
            operation: Which is implemented.
            module: The name of the module, where ``saved_like`` is.
            forward: As above.
            backward: As above.
        """
        self.operation = operation
        self.forward, self.backward = forward, backward
        self._module = module
        self.__signature__ = inspect.signature(forward)

    def saved_like(self, **arguments: Any) -> tuple[Tensor, ...]:
        """Empty tensors like the ``saved`` of these arguments."""
        return sys.modules[self._module].saved_like(**arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operation; autograd knows the way back."""
        given = dict(zip(self.operation.arguments, args, strict=False)) | kwargs
        flat = self.operation.flat(given)
        if torch.is_grad_enabled() and any(
            isinstance(value, Tensor) and value.requires_grad for value in flat
        ):
            layouts = {name: x for name, x in given.items() if isinstance(x, PackedLayout)}
            return self.operation.pack(_Differentiable.apply(self, layouts, *flat))  # type: ignore[arg-type]
        with torch.no_grad():
            return self.operation.pack(self.forward(**given)[0])


class _Differentiable(Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Kernel, layouts: Mapping[str, PackedLayout], *flat: Any
    ) -> tuple[Tensor, ...]:
        # A schema carries no lengths that the host knows, to ask for which would be to wait.
        ctx.known = {name: layout.cu_seqlens_host for name, layout in layouts.items()}
        arguments = _known(kernel.operation.restore(flat), ctx.known)
        results, saved = kernel.forward(**arguments)
        ctx.overwritten = arguments.get("overwritten", ())
        tensors = [value for value in flat if isinstance(value, Tensor)]
        ctx.kernel, ctx.counts = kernel, (len(tensors), len(results))
        ctx.rest = [None if isinstance(value, Tensor) else value for value in flat]
        ctx.is_tensor = [isinstance(value, Tensor) for value in flat]
        ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
        ctx.save_for_backward(*tensors, *results, *saved)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        operation = ctx.kernel.operation
        inplace_grad.begin(ctx, operation.op.name, ctx.overwritten)
        kept = ctx.saved_tensors
        inputs, results = ctx.counts
        tensors = iter(kept[:inputs])
        flat = [
            next(tensors) if is_tensor else value
            for is_tensor, value in zip(ctx.is_tensor, ctx.rest, strict=True)
        ]
        arguments = _known(operation.restore(flat), ctx.known)
        found = ctx.kernel.backward(
            tuple(gradient.contiguous() for gradient in grads),
            kept[inputs : inputs + results],
            kept[inputs + results :],
            **arguments,
        )
        found = {**found, **{x: inplace_grad.finish(arguments[x]) for x in ctx.overwritten}}
        # One that is missing is an error, not a zero.
        gradients = [
            found[name] if is_needed else None
            for name, is_needed in zip(operation.names, ctx.needs_input_grad[2:], strict=True)
        ]
        return None, None, *gradients


def _known(arguments: dict[str, Any], hosts: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The arguments with layouts that know their lengths on the host."""
    for name, host in hosts.items():
        arguments[name] = replace(arguments[name], cu_seqlens_host=host)
    return arguments
