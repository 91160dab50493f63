"""Autograd of losses over lattices: the forward computes the gradients while logits exist.

In the ``cpp`` backends torch computes projections and their gradients, and
`effasr_kernels.shared.lattice` sums over paths, with one thread per sequence. Sequences are
processed in groups, so that memory does not grow with their number.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import inplace_grad


def groups(sizes: Sequence[int], max_size: int) -> Iterator[tuple[int, int]]:
    """Divide sequences into groups; yield the first sequence and one past the last of each."""
    begin, used = 0, 0
    for n, size in enumerate(sizes):
        if n > begin and used + size > max_size:
            yield begin, n
            begin, used = n, 0
        used += size
    if begin < len(sizes):
        yield begin, len(sizes)


class Losses(Protocol):
    """Losses of a batch, and their gradients while the logits are in memory."""

    @property
    def frames(self) -> PackedLayout: ...  # a sequence without frames has no gradient

    def __call__(
        self,
        inputs: tuple[Tensor, ...],  # the differentiable tensors
        scales: Tensor | None = None,  # (N,), weights in the differentiated sum; by default 1
        gradients: tuple[Tensor, ...] = (),  # of each input, written, maybe the input itself
    ) -> Tensor: ...  # the losses, (N,)


def differentiable(
    op: str, losses: Losses, inputs: dict[str, Tensor], overwritten: Sequence[str] = ()
) -> Tensor:
    """Compute the losses, (N,), as a differentiable function of the inputs."""
    # The forward computes the gradient of the sum of the losses, and the backward scales it; if the
    # upstream gradients of the losses differ, the backward computes it again. A loss of +inf has
    # zero gradient, whatever its upstream gradient. Gradients of the inputs ``overwritten`` are
    # written over them in the backward; the forward then computes none.
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs.values())
    settings = op, losses, tuple(inputs), tuple(overwritten), has_gradient and not overwritten
    return _LossFunction.apply(settings, *inputs.values())


class _LossFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: tuple[Any, ...], *inputs: Tensor) -> Tensor:  # type: ignore[override]
        ctx.op, ctx.losses, ctx.names, ctx.overwritten, at_once = settings
        gradients = tuple(map(torch.empty_like, inputs)) if at_once else ()
        losses = ctx.losses(inputs, gradients=gradients)
        ctx.save_for_backward(losses, *inputs, *gradients)
        return losses

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        inplace_grad.begin(ctx, ctx.op, ctx.overwritten)
        losses, *tensors = ctx.saved_tensors
        count = len(ctx.names)
        inputs, gradients = tuple(tensors[:count]), tuple(tensors[count:])
        # Sequences without frames (of a static shape) and losses of +inf have no gradient.
        counted = grad[(ctx.losses.frames.cu_seqlens.diff() > 0) & ~losses.isinf()]
        if ctx.overwritten or bool((counted != counted[:1]).any()):
            # Gradients of weights are already summed over sequences and cannot be reweighted.
            gradients = tuple(
                x.detach() if name in ctx.overwritten else torch.empty_like(x)
                for name, x in zip(ctx.names, inputs, strict=True)
            )
            ctx.losses(inputs, grad, gradients)
        elif counted.numel():
            gradients = tuple(gradient * counted[0] for gradient in gradients)
        return None, *gradients
