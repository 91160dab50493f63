"""Linear layer whose bias gradient is computed with those of the whole layer of the model.

The gradient of the bias is the sum of the rows of the output's gradient. Autograd adds them in a
launch for each linear layer. Here the gradient of the output is handed over as partial sums
(`effasr_kernels.runtime.deferred_sums`), and the launch that adds up those of a whole layer of the
model reads its rows, too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from effasr_kernels.runtime.deferred_sums import PartialSums, hand_over, receivers, takes_rows
from effasr_kernels.runtime.dispatch import load
from effasr_kernels.shared.cpu.linear import linear


def biased_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute `torch.nn.functional.linear`, whose bias gradient waits where it can.

    Output and gradients of ``x`` and ``weight`` are those of torch bit by bit. Rows of the bias
    gradient are added in another order, in float32 as well.
    """
    # x: (..., K); weight: (N, K); bias: (N,)
    return _Linear.apply(x, weight, bias) if _may_wait(x, weight, bias) else linear(x, weight, bias)


def _may_wait(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not takes_rows(bias):
        return False
    if x.ndim != 2 or not x.dtype == weight.dtype == bias.dtype:
        return False
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype:
        return False
    # Loaded by name, as a machine without a GPU may lack Triton.
    launch = load("effasr_kernels.runtime.launch")
    return not isinstance(launch, str) and launch.refusal(x) is None


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (dy,) = grad_outputs
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        # The products of torch's own backward.
        dx = dy @ weight if needs_x else None
        dweight = dy.T @ x if needs_weight else None
        dbias: dict[str, Tensor | None] = {"bias": None}
        if needs_bias:
            rows = dy.contiguous()
            dbias["bias"] = out = rows.new_empty(rows.shape[1])
            sums = PartialSums(rows, out, None, partial(torch.sum, rows, 0, out=out))
            hand_over([sums], dbias, receivers(ctx, ["x", "weight", "bias"]))
        return dx, dweight, dbias["bias"]
