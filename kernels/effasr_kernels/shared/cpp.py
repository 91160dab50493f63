"""What operations share whose lattices are summed in C++ on a CPU: their backend ``cpp``.

Projections and their gradients are torch's; sums over paths are those of
`effasr_kernels.shared.lattice`, a sequence for each thread. Sequences are taken group by group, so
that memory does not grow with their number, and the gradient of the sum of the losses is made at
once, while the logits are there.
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
    """Why the CPU library cannot serve these tensors, or None; for ``unsupported_reason``.

    Args:
        tensors: The floating arguments of an operation, of one dtype and device; None is passed
            over.
    """
    x = next(tensor for tensor in tensors if tensor is not None)
    if x.device.type != "cpu":
        return "serves CPUs"
    if x.dtype == torch.float64:
        return "float64 is for the reference"
    reason = native.unsupported_reason()
    return None if reason is None else f"{reason} ({native.HOW_TO_BUILD})"


def groups(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Divide sequences into runs, first and past the last of each.

    Args:
        sizes: Of each sequence.
        most: The sum of a run; one sequence that has more is a run by itself.
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
    """Computes the losses of a batch, and gradients while the logits are there.

    Attributes:
        frames: The sequences; one of no frames has no gradient.
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
            inputs: What has a gradient.
            scales: The weight of each loss in the sum that is differentiated, (N,); by default 1.
            gradients: Written: those of that sum by each input, which may be the input itself.
                None are wanted by default.
        """
        ...


def differentiable(
    op: str, losses: Losses, inputs: dict[str, Tensor], overwritten: Sequence[str] = ()
) -> Tensor:
    """The losses (N,), to which autograd knows the way back.

    The gradient of their sum is made at once, and scaled in the backward; where losses are weighted
    differently, it is made again. A loss of +inf has zero gradient, whatever comes from upstream.

    Args:
        op: The operation, for messages.
        losses: Computes them.
        inputs: What has a gradient, by name.
        overwritten: Names of inputs over which the backward writes their gradients, which then are
            not made at once; see `effasr_kernels.runtime.inplace_grad`.
    """
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in inputs.values())
    settings = op, losses, tuple(inputs), tuple(overwritten), wanted and not overwritten
    return _Differentiable.apply(settings, *inputs.values())


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: tuple[Any, ...], *inputs: Tensor) -> Tensor:  # type: ignore[override]
        ctx.op, ctx.losses, ctx.names, ctx.overwritten, at_once = settings
        gradients = tuple(map(torch.empty_like, inputs)) if at_once else ()
        found = ctx.losses(inputs, gradients=gradients)
        ctx.save_for_backward(found, *inputs, *gradients)
        return found

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        inplace_grad.begin(ctx, ctx.op, ctx.overwritten)
        found, *tensors = ctx.saved_tensors
        count = len(ctx.names)
        inputs, gradients = tuple(tensors[:count]), tuple(tensors[count:])
        # Sequences without frames fill up a static shape; of neither these nor +inf comes anything.
        counted = grad[(ctx.losses.frames.cu_seqlens.diff() > 0) & ~found.isinf()]
        if ctx.overwritten or bool((counted != counted[:1]).any()):
            # Gradients of weights are sums over sequences: too late to weight them.
            gradients = tuple(
                x.detach() if name in ctx.overwritten else torch.empty_like(x)
                for name, x in zip(ctx.names, inputs, strict=True)
            )
            ctx.losses(inputs, grad, gradients)
        elif counted.numel():
            gradients = tuple(gradient * counted[0] for gradient in gradients)
        return None, *gradients
