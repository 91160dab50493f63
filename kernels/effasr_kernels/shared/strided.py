"""Shared functions of the references of convolutions with stride 2, on packed rows as one image.

An encoder frame is a *slot* of several rows, so that each sequence begins at a slot at every stage.
Taps reach at most one slot back and none ahead. Long batches can therefore be split between slots
if each piece starts one slot earlier and the results of that slot are dropped.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from effasr_kernels.packed import PackedLayout


def slot_table(layout: PackedLayout, lengths: Tensor, rows_per_slot: int) -> tuple[Tensor, Tensor]:
    """For each slot, whether it begins its sequence and how many rows the sequence still has."""
    # Both are (T,), bool and int64, computed on the device. The tail is one more sequence.
    ids = layout.sequence_ids()
    position = torch.arange(layout.rows, device=layout.device) - layout.cu_seqlens.long()[ids]
    remaining = F.pad(lengths, (0, 1))[ids] - position * rows_per_slot
    return position == 0, remaining


def unreal_rows(remaining: Tensor, rows_per_slot: int, step: int) -> Tensor:
    """Return the indices of the rows of a stage that are past the length of their sequence."""
    # They are few, so `Tensor.index_fill_` with them costs less than a mask over all rows. A row of
    # the stage counts as ``step`` rows in ``remaining``, the second result of `slot_table`.
    row = torch.arange(rows_per_slot, device=remaining.device) * step
    return (row >= remaining[:, None]).flatten().nonzero().squeeze(1)


def first_rows(first: Tensor, rows_per_slot: int) -> Tensor:
    """Return the indices of the first rows of all sequences in a stage except row 0."""
    return (first[1:].nonzero().squeeze(1) + 1) * rows_per_slot


def by_pieces(slots: int, size: int, compute: Callable[[slice], Tensor]) -> Tensor:
    """Compute rows in pieces of at most ``size`` slots, each with the slot before; join them."""
    pieces = [_dropped(compute(part), part, skipped) for part, skipped in _pieces(slots, size)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _pieces(slots: int, size: int) -> Iterator[tuple[slice, int]]:
    for begin in range(0, max(slots, 1), size):
        skipped = min(begin, 1)
        yield slice(begin - skipped, min(begin + size, slots)), skipped


def _dropped(rows: Tensor, part: slice, skipped: int) -> Tensor:
    return rows[skipped * rows.shape[0] // max(1, part.stop - part.start) :]


class StridedTaps(torch.autograd.Function):
    """Depthwise convolution of 3 x 3 taps with stride 2 as nine multiply-adds.

    The input is split into quarters by even and odd rows and columns. Every operand is then a dense
    matrix (rows, columns times channels), in which the next column is C elements away. On a CPU
    this is faster than `torch.conv2d` in either memory format.
    """

    @staticmethod
    def forward(
        ctx: Any, quarters: Tensor, taps: Tensor, bias: Tensor, first: Tensor, unreal: Tensor
    ) -> Tensor:
        """Convolve each channel, with a zero before each first row and column: (R, G, C)."""
        # ``quarters`` is (2, 2, R, G, C), contiguous, and ``taps`` (3, 3, C). The taps of the rows
        # ``first``, which begin a sequence, exclude the rows before. Rows ``unreal`` of the result
        # are zero.
        ctx.save_for_backward(quarters, taps, first, unreal)
        x, step, w = _dense(quarters, taps)
        y = torch.addcmul(bias.repeat(quarters.shape[3]), x[0, 0], w[1, 1])
        y.addcmul_(x[0, 1], w[1, 2]).addcmul_(x[1, 0], w[2, 1]).addcmul_(x[1, 1], w[2, 2])
        x_left, narrow = x[..., :-step], w[..., :-step]
        y[:, step:].addcmul_(x_left[0, 1], narrow[1, 0]).addcmul_(x_left[1, 1], narrow[2, 0])
        above = x[1, 0, :-1] * w[0, 1]
        above.addcmul_(x[1, 1, :-1], w[0, 2])
        above[:, step:].addcmul_(x_left[1, 1, :-1], narrow[0, 0])
        y[1:] += above.index_fill_(0, first - 1, 0)
        return y.index_fill_(0, unreal, 0).view(quarters.shape[2:])

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        quarters, taps, first, unreal = ctx.saved_tensors
        x, step, w = _dense(quarters, taps)
        x_left, narrow = x[..., :-step], w[..., :-step]
        grads_y = grad_outputs[0].flatten(1).index_fill(0, unreal, 0)
        right = grads_y[:, step:]
        below = grads_y[1:].index_fill(0, first - 1, 0)
        aslant = below[:, step:]
        grads = grads_y * w[1:, 1:, None]
        grads[:, 1, :, :-step].addcmul_(right, narrow[1:, 0, None])
        grads[1, :, :-1].addcmul_(below, w[0, 1:, None])
        grads[1, 1, :-1, :-step].addcmul_(aslant, narrow[0, 0])
        sums = torch.zeros_like(w)
        sums[1:, 1:] = (x * grads_y).sum(2)
        sums[1:, 0, :-step] = (x_left[:, 1] * right).sum(1)
        sums[0, 1:] = (x[1, :, :-1] * below).sum(1)
        sums[0, 0, :-step] = (x_left[1, 1, :-1] * aslant).sum(0)
        grad_taps = sums.view(3, 3, *quarters.shape[3:]).sum(2)
        grad_bias = grads_y.sum(0).view(-1, step).sum(0)
        return grads.view_as(quarters), grad_taps, grad_bias, None, None


def _dense(quarters: Tensor, taps: Tensor) -> tuple[Tensor, int, Tensor]:
    """Return the quarters as matrices, (2, 2, R, G C), C, and repeated taps, (3, 3, G C)."""
    width, channels = quarters.shape[3:]
    return quarters.flatten(3), channels, taps.repeat(1, 1, width)
