"""LSTM layers with resets inside a row, as one node of a compiled graph.

Torch's own LSTM can do neither: it has no resets, and a compiler unrolls it step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from effasr_kernels.runtime import checks
from effasr_kernels.runtime.torch_op import recording

_CLOSED_GATE = -1e4
"""Added to a gate's input, it makes the sigmoid and its gradient exactly 0 in every dtype."""


def lstm(x: Tensor, resets: Tensor, weights: Sequence[Tensor]) -> Tensor:
    r"""Run LSTM layers over rows that each hold several sequences.

    .. math::
        i, f, g, o = W x_s + b + R h_{s-1} + b', \qquad
        c_s = \sigma(f) c_{s-1} + \sigma(i) \tanh(g), \qquad
        h_s = \sigma(o) \tanh(c_s)

    as `torch.nn.LSTM`, with c and h exactly zero where ``resets``. There is no double backward.
    Under autocast all is cast as for a matrix product.
    """
    # x: (B, S, C), floating point, C the width of the first layer; resets: bool (B, S) -> h of the
    # last layer, (B, S, P)
    x, *cast = checks.under_autocast(x, *weights)
    shut = resets.to(x.dtype)[..., None]
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return torch.ops.effasr.lstm(x, shut, cast)
    return _run(x, shut, cast)


class LSTM(nn.Module):
    """The parameters of a `torch.nn.LSTM` under the same names, for `lstm`.

    torch.compile cannot trace torch's own module.
    """

    def __init__(self, width: int, layers: int):
        """Build at least one layer; input and layers have ``width`` = P channels."""
        super().__init__()
        self.width, self.layers = width, layers
        for layer in range(layers):
            for part, shape in _SHAPES.items():
                sizes = [factor * width for factor in shape]
                self.register_parameter(f"{part}_l{layer}", nn.Parameter(torch.empty(sizes)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as torch does, but with forget gates at sigmoid(1), open at first.

        References:
            Jozefowicz et al., 2015, https://proceedings.mlr.press/v37/jozefowicz15.html.
        """
        bound = 1 / math.sqrt(self.width)
        for name, parameter in self.named_parameters():
            nn.init.uniform_(parameter, -bound, bound)
            if name.startswith("bias"):
                forget = parameter.detach()[self.width : 2 * self.width]
                forget.fill_(1.0 if name.startswith("bias_ih") else 0.0)

    def forward(self, x: Tensor, resets: Tensor) -> Tensor:
        """Run over rows that hold several sequences each, as `lstm` does."""
        return lstm(x, resets, self.weights())

    def step(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute one step: x (N, P), h and c (layers, N, P) to (N, P) and the next h and c."""
        x, hidden, cell, *weights = checks.under_autocast(x, hidden, cell, *self.weights())
        out, hidden, cell = _layers(x[:, None], hidden, cell, weights)
        return out[:, 0], hidden, cell

    def weights(self) -> list[Tensor]:
        """Return the weights as `lstm` takes them."""
        return [getattr(self, f"{part}_l{n}") for n in range(self.layers) for part in _SHAPES]


_SHAPES = {"weight_ih": (4, 1), "weight_hh": (4, 1), "bias_ih": (4,), "bias_hh": (4,)}
"""Shapes of a layer's parameters, in units of the width."""


def _run(x: Tensor, shut: Tensor, weights: Sequence[Tensor]) -> Tensor:
    for layer in range(0, len(weights), 4):
        w_ih, w_hh, b_ih, b_hh = weights[layer : layer + 4]
        width = w_hh.shape[1]
        # An additional input, which is 1 at a reset and closes the gates i, f and o.
        column = w_ih.new_full((4, width), _CLOSED_GATE)
        column[2] = 0
        params = [torch.cat([w_ih, column.view(-1, 1)], 1), w_hh, b_ih, b_hh]
        start = x.new_zeros(1, x.shape[0], width)
        x, *_ = _layers(torch.cat([x, shut], 2), start, start, _contiguous(params))
    return x


def _layers(
    x: Tensor, hidden: Tensor, cell: Tensor, weights: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Run torch's LSTM; all tensors have one dtype already."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.lstm(
            x,
            (hidden, cell),
            weights,
            has_biases=True,
            num_layers=len(weights) // 4,
            dropout=0.0,
            train=torch.is_grad_enabled(),
            bidirectional=False,
            batch_first=True,
        )


def _contiguous(params: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors into consecutive memory, as cuDNN requires."""
    pieces = torch.cat([param.flatten() for param in params]).split([p.numel() for p in params])
    return [piece.view_as(param) for piece, param in zip(pieces, params, strict=True)]


_library = torch.library.Library("effasr", "FRAGMENT")
_library.define("lstm(Tensor x, Tensor shut, Tensor[] weights) -> Tensor")
_library.define("lstm_backward(Tensor grad, Tensor x, Tensor shut, Tensor[] weights) -> Tensor[]")


def _forward(x: Tensor, shut: Tensor, weights: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return _run(x, shut, weights).contiguous()


def _backward(grad: Tensor, x: Tensor, shut: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Repeat the forward with autograd and differentiate it."""
    with recording():
        leaves = [tensor.detach().requires_grad_() for tensor in (x, *weights)]
        found = torch.autograd.grad(_run(leaves[0], shut, leaves[1:]), leaves, grad)
    return [gradient.contiguous() for gradient in found]


def _fake(x: Tensor, shut: Tensor, weights: list[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], weights[-3].shape[1])


def _fake_backward(grad: Tensor, x: Tensor, shut: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (x, *weights)]


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, list[Tensor]], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], *inputs[2])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, list[Tensor]]:
    x, shut, *weights = ctx.saved_tensors
    of_x, *of_weights = torch.ops.effasr.lstm_backward(grad, x, shut, weights)
    return of_x, None, of_weights


def _flops(x: Tensor, shut: Tensor, weights: list[Tensor], out_val: Any = None) -> int:
    """Count every slot, including free ones, which are computed too."""
    slots = x.shape[0] * x.shape[1]
    return 2 * slots * sum(weight.numel() for weight in weights if weight.ndim > 1)


def _flops_backward(
    grad: Tensor, x: Tensor, shut: Tensor, weights: list[Tensor], out_val: Any = None
) -> int:
    return 2 * _flops(x, shut, weights)


def _register(
    name: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    flops: Callable[..., int],
) -> None:
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"effasr::{name}", fake, lib=_library)
    register_flop_formula(getattr(torch.ops.effasr, name), get_raw=True)(flops)


_register("lstm", _forward, _fake, _flops)
_register("lstm_backward", _backward, _fake_backward, _flops_backward)
torch.library.register_autograd("effasr::lstm", _differentiate, setup_context=_save, lib=_library)
