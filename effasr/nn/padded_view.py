"""Sequences side by side in lanes, as many and as long for every batch of a static shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels import PackedLayout


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where the rows of packed sequences are in a grid (count, steps), read lane by lane.

    A recurrence runs over all lanes at once. One sequence a lane would be mostly padding, because a
    static shape has room for many more sequences than a batch holds. So a lane holds several, end
    to end, with a free slot in front of each, where the recurrence must forget what was before.

    Attributes:
        count: B, the lanes.
        steps: S, the slots of each.
        slots: int64 (rows,), the place of each row in the grid laid flat; B S in the tail.
    """

    count: int
    steps: int
    slots: Tensor

    @classmethod
    def of(cls, layout: PackedLayout, longest: int) -> Lanes:
        """Lay out packed sequences.

        With the free slots they fill at most R rows, and none is longer than W = longest + 1. A
        sequence that starts in rows k W to (k + 1) W - 1 of the packed tensor is in lane k, so that
        a lane needs less than 2 W slots and all need about 2 R. The device is not asked for a
        length.

        Args:
            layout: The sequences.
            longest: What no length exceeds. Not ``layout.max_seqlen_bound``, because compiled
                code does not know it of a layout that it has derived.
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
        """Lay integers (rows,) into the grid (count, steps), with ``fill`` in the free slots."""
        # The last one is where the tail goes.
        flat = rows.new_full((self.count * self.steps + 1,), fill)
        return flat.scatter(0, self.slots, rows)[:-1].view(self.count, self.steps)

    def free(self) -> Tensor:
        """Which slots hold no row: bool (count, steps)."""
        return self.spread(torch.zeros_like(self.slots), 1).bool()

    def collect(self, grid: Tensor) -> Tensor:
        """Read (count, steps, C) back into rows (rows, C); those of the tail mean nothing."""
        last = self.count * self.steps - 1
        return grid.flatten(0, 1).index_select(0, self.slots.clamp(max=last))
