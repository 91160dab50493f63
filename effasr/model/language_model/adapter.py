"""Adapter from encoder frames to rows of a language model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.nn.linear import Linear


class StackingAdapter(nn.Module):
    """Stacks k neighbouring frames and projects them: one or two linear layers."""

    def __init__(self, width: int, output: int, stack: int, hidden: int | None):
        """Build the layers."""
        super().__init__()
        self.stack = stack
        self.stack_proj = Linear(stack * width, output if hidden is None else hidden)
        self.output_proj = None if hidden is None else Linear(hidden, output)

    def forward(self, encoded: Tensor, stacks: Tensor) -> Tensor:
        """Map frames to rows."""
        # encoded: (T, width); stacks: int64 (A, k), the frames of each row; T for a frame past the
        # end of its clip, which counts as zeros -> (A, output)
        frames = torch.cat([encoded, encoded.new_zeros(1, encoded.shape[1])])
        stacked = frames.index_select(0, stacks.flatten()).view(stacks.shape[0], -1)
        x = self.stack_proj(stacked)
        return x if self.output_proj is None else self.output_proj(F.gelu(x))
