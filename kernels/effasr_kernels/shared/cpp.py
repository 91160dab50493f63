"""Shared code of the ``cpp`` backends of the losses, whose lattices are summed in C++ on a CPU.

Torch computes projections and their gradients; `effasr_kernels.shared.lattice` computes sums over
paths, with one thread per sequence. Sequences are processed in groups, so that memory does not grow
with their number. The forward also computes the gradient of the sum of the losses, while the logits
are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import inplace_grad, native


def refusal(*tensors: Tensor | None) -> str | None:
    """The reason why the CPU library does not support these tensors, or None.

    Args:
        tensors: The floating arguments of an operation, of one dtype and device; None is skipped.
    """
    x = next(tensor for tensor in tensors if tensor is not None)
    if x.device.type != "cpu":
        return "supports only CPUs"
    if x.dtype == torch.float64:
        return "float64 is for the reference"
    reason = native.unsupported_reason()
    return None if reason is None else f"{reason} ({native.HOW_TO_BUILD})"


def groups(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Divide sequences into groups; yield the first sequence and one past the last of each.

    Args:
        sizes: Size of each sequence.
        most: Maximum sum of the sizes in a group; a larger sequence is a group by itself.
    """
    begin, used = 0, 0
    for n, size in enumerate(sizes):
        if n > begin and used + size > most:
            yield begin, n
            begin, used = n, 0
        used += size
    if begin < len(sizes):
        yield begin, len(sizes)


class Losses(Protocol):
    """Computes the losses of a batch, and their gradients while the logits are in memory.

    Attributes:
        frames: The layout of the frames; a sequence without frames has no gradient.
    """

    @property
    def frames(self) -> PackedLayout:
        """As above."""
        ...

    def __call__(
        self,
        inputs: tuple[Tensor, ...],
        scales: Tensor | None = None,
        gradients: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """Return the losses, (N,).

        Args:
            inputs: The differentiable tensors.
            scales: Weight of each loss in the sum that is differentiated, (N,); by default 1.
            gradients: Outputs: the gradient of this sum with respect to each input. Each may be the
                input itself. If empty, no gradient is computed.
        """
        ...


def differentiable(
    op: str, losses: Losses, inputs: dict[str, Tensor], overwritten: Sequence[str] = ()
) -> Tensor:
    """Compute the losses, (N,), as a differentiable function of the inputs.

    The forward computes the gradient of the sum of the losses, and the backward scales it; if the
    upstream gradients of the losses differ, the backward computes it again. A loss of +inf has zero
    gradient, whatever its upstream gradient.

    Args:
        op: The operation, for messages.
        losses: Computes the losses.
        inputs: The differentiable tensors by name.
        overwritten: Names of inputs over which the backward writes their gradients; the forward
            then computes no gradients. See `effasr_kernels.runtime.inplace_grad`.
    """
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
