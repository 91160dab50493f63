"""Prediction networks of a transducer: stateless, or LSTM layers over a padded grid with resets."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from effasr_kernels import PackedLayout, depthwise_conv
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.torch_op import recording


@dataclass(frozen=True, slots=True)
class PaddedView:
    """The places of packed rows in a grid (count, steps).

    A recurrence runs over all rows of the grid at once. With one sequence per row the grid would be
    mostly padding, as a static shape has room for many more sequences than a batch holds. So a row
    holds several sequences, each after a free slot, where the recurrence must be reset.
    """

    count: int  # B, rows of the grid
    steps: int  # S, slots of each row
    # int64 (rows,), the place of each packed row in the flattened grid; B S for the tail
    slots: Tensor

    @classmethod
    def of(cls, layout: PackedLayout, longest: int) -> "PaddedView":
        """Lay out packed sequences, without asking the device for a length.

        With the free slots the sequences fill at most R rows, and none is longer than W = longest +
        1. A sequence that starts in packed rows k W to (k + 1) W - 1 goes to row k of the grid, so
        that each grid row needs fewer than 2 W slots, and all together about 2 R. ``longest`` is an
        argument, as compiled code does not know ``max_seqlen_bound`` of a derived layout.
        """
        spaced, width = layout.lengthened(1), longest + 1
        count = max(-(-spaced.rows // width), 1)
        steps = max(min(2 * width - 1, spaced.rows), 1)
        first = spaced.cu_seqlens.long()[layout.sequence_ids()]
        lane = torch.div(first, width, rounding_mode="floor")
        step = first - lane * width + layout.positions() + 1
        slots = (lane * steps + step).where(layout.mask(), count * steps)
        return cls(count, steps, slots)

    def spread(self, rows: Tensor, fill: int) -> Tensor:
        """Write integers (rows,) into the grid (count, steps); free slots get ``fill``."""
        # The last one is where the tail goes.
        flat = rows.new_full((self.count * self.steps + 1,), fill)
        return flat.scatter(0, self.slots, rows)[:-1].view(self.count, self.steps)

    def free(self) -> Tensor:
        return self.spread(torch.zeros_like(self.slots), 1).bool()

    def collect(self, grid: Tensor) -> Tensor:
        """Read (count, steps, C) back into rows (rows, C); rows of the tail have no meaning."""
        last = self.count * self.steps - 1
        return grid.flatten(0, 1).index_select(0, self.slots.clamp(max=last))


_CLOSED_GATE = -1e4
"""Added to a gate's input, it makes the sigmoid and its gradient exactly 0 in every dtype."""


def lstm(x: Tensor, resets: Tensor, weights: Sequence[Tensor]) -> Tensor:
    r"""Run LSTM layers over rows that each hold several sequences.

    .. math::
        i, f, g, o = W x_s + b + R h_{s-1} + b', \qquad
        c_s = \sigma(f) c_{s-1} + \sigma(i) \tanh(g), \qquad
        h_s = \sigma(o) \tanh(c_s)

    as `torch.nn.LSTM`, which has no resets and which a compiler unrolls step by step. c and h are
    zero where ``resets``; ``weights`` are ``weight_ih`` (4P, C), ``weight_hh`` (4P, P), ``bias_ih``
    and ``bias_hh`` of each layer, gates in the order i, f, g, o. There is no double backward.
    """
    # x: (B, S, C), floating point, C the width of the first layer; resets: bool (B, S) -> (B, S, P)
    x, *cast = checks.under_autocast(x, *weights)
    shut = resets.to(x.dtype)[..., None]
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return torch.ops.effasr.lstm(x, shut, cast)
    return _run(x, shut, cast)


class LSTM(nn.Module):
    """The parameters of a `torch.nn.LSTM` under the same names, for `lstm`."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.width, self.layers = width, layers
        for layer in range(layers):
            for part, shape in _SHAPES.items():
                sizes = [factor * width for factor in shape]
                self.register_parameter(f"{part}_l{layer}", nn.Parameter(torch.empty(sizes)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch, but with forget gates at sigmoid(1): Jozefowicz et al., 2015."""
        bound = 1 / math.sqrt(self.width)
        for name, parameter in self.named_parameters():
            nn.init.uniform_(parameter, -bound, bound)
            if name.startswith("bias"):
                forget = parameter.detach()[self.width : 2 * self.width]
                forget.fill_(1.0 if name.startswith("bias_ih") else 0.0)

    def forward(self, x: Tensor, resets: Tensor) -> Tensor:
        return lstm(x, resets, self.weights())

    def step(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step: x (N, P), h and c (layers, N, P) to (N, P) and the next h and c."""
        x, hidden, cell, *weights = checks.under_autocast(x, hidden, cell, *self.weights())
        out, hidden, cell = _layers(x[:, None], hidden, cell, weights)
        return out[:, 0], hidden, cell

    def weights(self) -> list[Tensor]:
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
        gradients = torch.autograd.grad(_run(leaves[0], shut, leaves[1:]), leaves, grad)
    return [gradient.contiguous() for gradient in gradients]


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


PredictorState = tuple[Tensor, ...]
"""State of a predictor between labels: tensors (N, ...)."""


class StatelessPredictor(nn.Module):
    """The last few labels, embedded, weighted per channel and summed; then ReLU.

    Ghodsi et al., 2020, https://ieeexplore.ieee.org/document/9054419; icefall's ``Decoder``, whose
    convolution mixes four channels.
    """

    def __init__(self, vocab_size: int, width: int, context: int, dropout: float = 0.0):
        super().__init__()
        self.start_id, self.context, self.dropout = vocab_size, context, dropout
        self.embedding = nn.Embedding(vocab_size + 1, width)
        self.taps = nn.Parameter(torch.empty(width, context))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.embedding.weight)
        bound = 1 / math.sqrt(self.context)
        nn.init.uniform_(self.taps, -bound, bound)

    def forward(self, labels: Tensor, layout: PackedLayout) -> Tensor:
        # labels: int64 (U,), each in [0, V) -> (U + N, P): for each sequence one row before any
        # label, and one after each label
        rows = layout.lengthened(1)
        x = F.dropout(
            self.embedding(after_start(labels, layout, self.start_id)), self.dropout, self.training
        )
        return F.relu(depthwise_conv(x, self.taps, rows, causal=True))

    def begin(self, count: int) -> PredictorState:
        """The state before the start symbol; -1 is no label."""
        seen = count, self.context - 1
        return (torch.full(seen, -1, device=self.taps.device),)

    def step(self, labels: Tensor, state: PredictorState) -> tuple[Tensor, PredictorState]:
        """Read one more label of each sequence, beginning with the start symbol."""
        # labels: int64 (N,) -> (N, P)
        seen = torch.cat([state[0], labels[:, None]], 1)
        embedded = self.embedding(seen.clamp(min=0)) * (seen >= 0)[..., None]
        return F.relu((embedded * self.taps.T).sum(1)), (seen[:, 1:],)


class LSTMPredictor(nn.Module):
    """Embedded labels, read by LSTM layers: ``ParakeetRNNTDecoder`` before its projection."""

    def __init__(self, vocab_size: int, width: int, layers: int, dropout: float = 0.0):
        super().__init__()
        self.start_id, self.dropout = vocab_size, dropout
        self.embedding = nn.Embedding(vocab_size + 1, width)
        self.lstm = LSTM(width, layers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.embedding.weight)
        self.lstm.reset_parameters()

    def forward(self, labels: Tensor, layout: PackedLayout) -> Tensor:
        lanes = PaddedView.of(layout.lengthened(1), layout.max_seqlen_bound + 1)
        ids = lanes.spread(after_start(labels, layout, self.start_id), self.start_id)
        x = F.dropout(self.embedding(ids), self.dropout, self.training)
        hidden = self.lstm(x, lanes.free())
        return F.dropout(lanes.collect(hidden), self.dropout, self.training)

    def begin(self, count: int) -> PredictorState:
        """The state before the start symbol: h and c, (N, layers, P)."""
        weight = self.embedding.weight
        zeros = weight.new_zeros(count, self.lstm.layers, self.lstm.width)
        return zeros, zeros

    def step(self, labels: Tensor, state: PredictorState) -> tuple[Tensor, PredictorState]:
        hidden, cell = (part.transpose(0, 1).contiguous() for part in state)
        out, hidden, cell = self.lstm.step(self.embedding(labels), hidden, cell)
        return out, (hidden.transpose(0, 1), cell.transpose(0, 1))


def after_start(labels: Tensor, layout: PackedLayout, start_id: int) -> Tensor:
    """Insert the start symbol before each sequence."""
    # labels: int64 (U,) -> int64 (U + N,)
    rows = layout.lengthened(1)
    sequences = rows.sequence_ids()
    starts = rows.cu_seqlens.long()[sequences]
    row = torch.arange(rows.rows, device=labels.device)
    padded = F.pad(labels, (1, 0), value=start_id)
    # In sequence n, row r > 0 of the longer layout is label r - n - 1, so r - n of the padded ones.
    is_label = (row > starts) & rows.mask()
    return padded[(row - sequences).where(is_label, 0)]
