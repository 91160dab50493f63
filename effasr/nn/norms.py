"""Batch normalisation over the rows that belong to an utterance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from effasr.nn.stack import is_recomputing
from effasr_kernels import PackedLayout, batch_norm, update_running_statistics


class BatchNorm(nn.Module):
    """`torch.nn.BatchNorm1d` of packed rows, which ignores the tail of a static shape.

    Statistics and sums are float32 (float64 for float64), whatever the dtype of the rows.
    Parameters and buffers are those of the torch module, so a ``state_dict`` of one fits the other.
    Each process has its own statistics; a forward that activation checkpointing repeats does not
    count again.

    Padded trainers include padding in these statistics; this module counts real rows only.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float = 0.1):
        """Start with mean 0 and variance 1."""
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.register_buffer("running_mean", torch.empty(channels))
        self.register_buffer("running_var", torch.empty(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset parameters and running statistics."""
        for ones in (self.weight, self.running_var):
            nn.init.ones_(ones)
        for zeros in (self.bias, self.running_mean, self.num_batches_tracked):
            nn.init.zeros_(zeros)

    def forward(
        self,
        x: Tensor,
        layout: PackedLayout,
        statistics: tuple[Tensor, Tensor] | None = None,
        *,
        silu: bool = False,
    ) -> Tensor:
        """Normalise each channel, in training by the statistics of this batch."""
        # x: (T, C) -> (T, C), the dtype of ``x``, under autocast the dtype of products; zero in the
        # tail
        if not self.training:
            statistics = self.running_mean, self.running_var
        else:
            statistics = statistics or _statistics(x, layout)
            # In its own recomputation the compiler omits the update.
            if torch.compiler.is_compiling() or not is_recomputing():
                update_running_statistics(
                    self.running_mean,
                    self.running_var,
                    self.num_batches_tracked,
                    *statistics,
                    layout,
                    momentum=self.momentum,
                )
        return batch_norm(
            x,
            self.weight,
            self.bias,
            *statistics,
            layout,
            eps=self.eps,
            silu=silu,
            fixed=not self.training,
        )


@torch.no_grad()
def _statistics(x: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    x = x if x.dtype == torch.float64 else x.float()
    mask = layout.mask()[:, None] if layout.has_tail else None
    count = layout.cu_seqlens[-1].to(x.dtype).clamp(min=1)
    mean = _masked(x, mask).sum(0) / count
    return mean, _masked(x - mean, mask).square().sum(0) / count


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else torch.where(mask, x, 0.0)
