"""Implementations that bring their own backward, as one autograd function for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from effasr_kernels.runtime import inplace_grad

if TYPE_CHECKING:
    from effasr_kernels.runtime.torch_op import TorchOp


class OwnBackward(Function):
    """A call of an implementation that has ``forward`` and ``backward``; see `dispatch`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, op: TorchOp, implementation: Any, arguments: Any, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Run the forward. ``tensors`` are those of the arguments, shown to autograd."""
        results, saved = implementation.forward(arguments)
        ctx.op, ctx.implementation = op, implementation
        # Tensors are saved through autograd, so that hooks and checks of versions see them.
        ctx.others, ctx.count = op.schema.others(arguments), len(results)
        ctx.overwritten = op.overwritten(arguments)
        integers = [x for x in results if not x.is_floating_point()]
        if integers:
            ctx.mark_non_differentiable(*integers)
        ctx.save_for_backward(*tensors, *results, *saved)
        return results

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Run the backward. One that does not return a gradient which is needed fails here."""
        names, overwritten = ctx.op.schema.tensor_names, ctx.overwritten
        inplace_grad.begin(ctx, ctx.op.name, overwritten)
        # Read once: activation checkpointing computes them at that moment.
        kept = ctx.saved_tensors
        inputs, results = len(names), len(names) + ctx.count
        arguments = ctx.op.schema.join(kept[:inputs], ctx.others)
        upstream = tuple([gradient.contiguous() for gradient in grads])
        found = ctx.implementation.backward(
            arguments, upstream, kept[inputs:results], kept[results:]
        )
        for name in overwritten:
            found[name] = inplace_grad.finish(getattr(arguments, name))
        gradients = [
            found[name] if is_needed else None
            for name, is_needed in zip(names, ctx.needs_input_grad[3:], strict=True)
        ]
        return None, None, None, *gradients
