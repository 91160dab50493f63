"""Rows in slots: each row of a layout stands for a slot, a fixed number of rows."""

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks

SIZES = (1, 2, 4, 8)
"""Rows that a slot may have."""


def rows_of(values: Tensor, layout: PackedLayout, rows_per_slot: int, *, tail: float = 0) -> Tensor:
    """Give each row the value of its sequence: (N, ...) to (s T, ...), ``tail`` in the tail."""
    padded = torch.cat([values, values.new_full((1, *values.shape[1:]), tail)])
    return padded[layout.sequence_ids()].repeat_interleave(rows_per_slot, 0)


def row_positions(layout: PackedLayout, rows_per_slot: int) -> Tensor:
    """Return the position of each row in its sequence or in the tail: int64 (s T,)."""
    step = torch.arange(rows_per_slot, device=layout.device)
    return (layout.positions()[:, None] * rows_per_slot + step).flatten()


def check_slots(
    op: str, x: Tensor, lengths: Tensor, layout: PackedLayout, rows_per_slot: int
) -> None:
    """Check rows in slots, (s T, C), and the number of real rows of each sequence."""
    if rows_per_slot not in SIZES:
        raise checks.wrong(op, "rows_per_slot", f"be one of {SIZES}", rows_per_slot)
    checks.check_shape(op, "x", x, "(s T, C)", rows_per_slot * layout.rows, None)
    checks.check_floating(op, x=x)
    checks.check_shape(op, "lengths", lengths, "(N,)", layout.num_sequences)
    checks.check_integers(op, "lengths", lengths, "x", x)
    if layout.device != x.device:
        raise checks.wrong(op, "layout", f"be on {x.device}, as `x` is", layout.device)
