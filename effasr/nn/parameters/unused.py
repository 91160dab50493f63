"""Zero gradients for unused parameters, for which DDP would wait forever."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from effasr.nn.parameters.sharded import is_sharded_tensor


def touch_unused_parameters(x: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """Return ``x`` such that its backward gives these parameters a zero gradient.

    DDP waits until every parameter has a gradient.
    """
    reached = [parameter for parameter in parameters if not is_sharded_tensor(parameter)]
    return _TouchParameters.apply(x, *reached)  # type: ignore[return-value]


class _TouchParameters(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.forms = [(parameter.shape, parameter.dtype) for parameter in parameters]
        # Not a view, of which FSDP2 warns; x is as small as a loss.
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (dx,) = grad_outputs
        # One zero each, however large the parameter.
        return dx, *(dx.new_zeros((), dtype=dtype).expand(shape) for shape, dtype in ctx.forms)
