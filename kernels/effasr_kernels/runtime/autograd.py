"""The autograd function of all implementations that define their own backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from effasr_kernels.runtime import deferred_sums, inplace_grad

if TYPE_CHECKING:
    from effasr_kernels.runtime.torch_op import DifferentiableOp


class ImplementationFunction(Function):
    """Calls ``forward`` and ``backward`` of an implementation; see `dispatch.Dispatcher`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, op: DifferentiableOp, implementation: Any, arguments: Any, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Run the forward. ``tensors`` are the tensor fields of ``arguments``."""
        results, saved = implementation.forward(arguments)
        ctx.op, ctx.implementation = op, implementation
        # Autograd would launch a kernel that writes zeros for each result that was not used.
        ctx.set_materialize_grads(False)
        # Tensors are saved through autograd, so that saved-tensor hooks and version checks apply.
        ctx.others, ctx.count = op.schema.others(arguments), len(results)
        ctx.overwritten = op.overwritten(arguments)
        integers = [x for x in results if not x.is_floating_point()]
        if integers:
            ctx.mark_non_differentiable(*integers)
        # `next_functions` has no entry for an argument that is None.
        given = zip(op.schema.tensor_names, tensors, strict=True)
        ctx.given = [name for name, x in given if x is not None]
        unread = op.unread(arguments)
        if unread:
            names = zip(op.schema.tensor_names, tensors, strict=True)
            tensors = tuple([None if name in unread else x for name, x in names])
        ctx.save_for_backward(*tensors, *results, *saved)
        return results

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Run the backward; a KeyError reports a required gradient that it does not return."""
        names, overwritten = ctx.op.schema.tensor_names, ctx.overwritten
        inplace_grad.begin(ctx, ctx.op.name, overwritten)
        # Read only once: activation checkpointing recomputes them at each access.
        saved = ctx.saved_tensors
        inputs, results = len(names), len(names) + ctx.count
        arguments = ctx.op.schema.join(saved[:inputs], ctx.others)
        outputs = saved[inputs:results]
        upstream = _upstream(grads, outputs, ctx.op.undifferentiated)
        receivers = deferred_sums.receivers(ctx, ctx.given)
        with deferred_sums.waiting(is_allowed=bool(receivers)) as waiting:
            gradients = ctx.implementation.backward(arguments, upstream, outputs, saved[results:])
        for name in overwritten:
            gradients[name] = inplace_grad.finish(getattr(arguments, name))
        required = {
            name: gradients[name] if is_needed else None
            for name, is_needed in zip(names, ctx.needs_input_grad[3:], strict=True)
        }
        deferred_sums.hand_over(waiting, required, receivers)
        return None, None, None, *required.values()


def _upstream(
    grads: Sequence[Tensor | None], results: Sequence[Tensor], undifferentiated: Collection[int]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the results: zeros for those that were not used.

    Args:
        grads: Gradients of the results; None for a result that was not used.
        results: The results.
        undifferentiated: Indices of results whose gradients the backward does not read.
    """
    return tuple(
        [
            gradient.contiguous()
            if gradient is not None
            else None
            if index in undifferentiated
            else torch.zeros_like(result, memory_format=torch.contiguous_format)
            for index, (gradient, result) in enumerate(zip(grads, results, strict=True))
        ]
    )
