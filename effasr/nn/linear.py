"""Linear layers: oneDNN's products on CPUs, joined projections, gradients in float32 on GPUs."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from effasr_kernels.runtime.deferred_sums import (
    PartialSums,
    hand_over,
    receivers,
    take_from,
    takes_rows,
)
from effasr_kernels.runtime.dispatch import load
from effasr_kernels.shared.cpu.linear import linear


def connected_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, whose gradients of weight and bias go straight to where they are added up.

    Autograd would round the gradient of a weight to the weight's dtype, and add up the rows of each
    bias gradient in a launch of its own. Here the node that connects a weight in 16 bits to that in
    float32 computes the product, in float32 and where possible into the gradient itself; and the
    gradient of the output is handed over as partial sums of the bias's
    (`effasr_kernels.runtime.deferred_sums`), so that the launch that adds up those of a whole layer
    of the model reads its rows, too.
    """
    # x: (..., K); weight: (N, K); bias: (N,)
    function = _Linear.apply if _is_connected(x, weight, bias) else linear
    return function(x, weight, bias)


def _is_connected(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    if not hasattr(weight.grad_fn, "products") and (bias is None or not takes_rows(bias)):
        return False
    if x.ndim < 2 or x.dtype != weight.dtype or (bias is not None and bias.dtype != x.dtype):
        return False
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype:
        return False
    # Loaded by name, as a machine without a GPU may lack Triton.
    launch = load("effasr_kernels.runtime.launch")
    return not isinstance(launch, str) and launch.refusal(x) is None


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        sums, shape = take_from(grad_outputs[0]), x.shape
        dy, x = grad_outputs[0].flatten(0, -2), x.flatten(0, -2)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx = None
        if needs_x:
            node, _ = ctx.next_functions[0]
            total = getattr(node, "total_of_products", None)
            if total is None or not torch._C._will_engine_execute_node(node):
                # The product of torch's own backward.
                dx = (dy @ weight).view(shape)
            elif total:
                flat = total[0].view(x.shape)
                torch.addmm(flat, dy, weight, out=flat)
            else:
                total.append((dy @ weight).view(shape))
        dweight = None
        if needs_weight:
            node, index = ctx.next_functions[1]
            products = getattr(node, "products", None)
            if products is not None and torch._C._will_engine_execute_node(node):
                products.add(index, dy.T, x)
            else:
                dweight = dy.T @ x
        dbias: dict[str, Tensor | None] = {"bias": None}
        if needs_bias:
            node, _ = ctx.next_functions[2]
            takes = sums is not None or getattr(node, "takes_rows", False)
            if sums is None:
                rows = dy.contiguous()
                out = rows.new_empty(rows.shape[1])
                sums = PartialSums(rows, out, None, partial(torch.sum, rows, 0, out=out))
            dbias["bias"] = sums.out
            hand_over([sums], dbias, receivers(ctx, ["x", "weight", "bias"]) if takes else {})
        return dx, dweight, dbias["bias"]


def shared_input(x: Tensor) -> Tensor:
    """``x``, which several linear layers read: their products add up its gradient themselves."""
    return _Shared.apply(x) if x.requires_grad and not torch.compiler.is_compiling() else x


class _Shared(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.total_of_products = []  # Their sum so far, if there is one
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor | None
    ) -> Tensor | None:
        sums = [x for x in (*ctx.total_of_products, *grad_outputs) if x is not None]
        ctx.total_of_products.clear()
        return sums[0] + sums[1] if len(sums) == 2 else next(iter(sums), None)


class Linear(nn.Linear):
    """`torch.nn.Linear` with oneDNN's products on a CPU; see `connected_linear` for a GPU."""

    def forward(self, input: Tensor, *, with_bias: bool = True) -> Tensor:
        return connected_linear(input, self.weight, self.bias if with_bias else None)


class JoinedLinear(Linear):
    """Layers of one size on one input, as one product; ``bias`` holds the existing ones."""

    biased: tuple[bool, ...]  # Whether each layer has a bias

    def __init__(self, width: int, size: int, biased: Sequence[bool]):
        super().__init__(width, len(biased) * size, bias=False)
        self.biased = tuple(biased)
        self.bias = nn.Parameter(self.weight.new_zeros(sum(biased) * size))

    def forward(self, input: Tensor, *, with_bias: bool = True) -> Tensor:
        return connected_linear(input, self.weight, whole_bias(self) if with_bias else None)


def joined_linear(width: int, size: int, biased: Sequence[bool]) -> nn.Linear:
    """A `JoinedLinear`, or a plain layer where all parts have a bias or none has."""
    if all(biased) or not any(biased):
        return Linear(width, len(biased) * size, bias=all(biased))
    return JoinedLinear(width, size, biased)


def whole_bias(layer: nn.Linear) -> Tensor | None:
    """The bias of a layer, with zeros for parts without one: (out,), or None."""
    biased, bias = getattr(layer, "biased", None), layer.bias
    if biased is None or bias is None:
        return bias
    # Zeros in the product's own addition cost nothing; a second addition would cost a pass.
    size = layer.out_features // len(biased)
    none, parts = bias.new_zeros(size), []
    for number, has in enumerate(biased):
        begin = size * sum(biased[:number])
        parts.append(bias[begin : begin + size] if has else none)
    return torch.cat(parts)
