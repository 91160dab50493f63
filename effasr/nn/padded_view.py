"""Packed sequences as rows of a padded grid, of the same size for every static shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels import PackedLayout


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
    def of(cls, layout: PackedLayout, longest: int) -> PaddedView:
        """Lay out packed sequences, without asking the device for a length.

        With the free slots the sequences fill at most R rows, and none is longer than W = longest +
        1. A sequence that starts in packed rows k W to (k + 1) W - 1 goes to row k of the grid, so
        that each grid row needs fewer than 2 W slots, and all together about 2 R.
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
        """Return which slots hold no row: bool (count, steps)."""
        return self.spread(torch.zeros_like(self.slots), 1).bool()

    def collect(self, grid: Tensor) -> Tensor:
        """Read (count, steps, C) back into rows (rows, C); rows of the tail have no meaning."""
        last = self.count * self.steps - 1
        return grid.flatten(0, 1).index_select(0, self.slots.clamp(max=last))
