"""Rows sorted by expert, on the device: the host never knows how many rows an expert has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from effasr.nn.experts.config import ExpertsConfig
from effasr_kernels import PackedLayout


@dataclass(frozen=True, slots=True)
class Groups:
    """A permutation of rows that sorts them by expert; rows without one come last."""

    order: Tensor  # int64 (T,), the row at each place of the sorted rows
    place: Tensor  # int64 (T,), its inverse: the place of each row
    layout: PackedLayout  # Layout of the sorted rows: a sequence for each expert

    @classmethod
    def of(cls, expert: Tensor, count: int) -> Groups:
        """Sort rows by the number of their expert."""
        # expert: int64 (T,), in [0, count); ``count`` for a row without an expert
        # Stable: the rows of an expert keep their order, in which gradients are added.
        found, order = torch.sort(expert, stable=True)
        rows = torch.arange(len(order), device=order.device)
        place = torch.empty_like(order).scatter_(0, order, rows)
        offsets = torch.searchsorted(found, torch.arange(count + 1, device=order.device))
        return cls(order, place, PackedLayout.from_offsets(offsets.int(), len(order)))

    @classmethod
    def of_sequences(cls, expert: Tensor, layout: PackedLayout, count: int) -> Groups:
        """Sort the rows of sequences by the expert of the sequence."""
        # expert: int64 (N,), in [0, count)
        with_tail = torch.cat([expert, expert.new_full((1,), count)])
        return cls.of(with_tail[layout.sequence_ids()], count)

    def sort(self, x: Tensor) -> Tensor:
        """Return rows (T, ...) sorted by expert."""
        return _Permute.apply(x, self.order, self.place)  # type: ignore[return-value]

    def restore(self, x: Tensor) -> Tensor:
        """Return sorted rows (T, ...) in their own order."""
        return _Permute.apply(x, self.place, self.order)  # type: ignore[return-value]

    def sizes(self) -> Tensor:
        """Return the number of rows of each expert: int32 (count,), on the device."""
        return self.layout.cu_seqlens.diff()


def named_expert(config: ExpertsConfig | None, expert: Tensor | None) -> Tensor | None:
    """Return the expert of each sequence, int64 (N,), where names choose it; else None."""
    # expert: int64 (N,), the expert of each sequence; None if the batch names none
    if config is None or config.is_learned:
        return None
    if expert is None:
        raise ValueError(
            f"`expert` must be given for each utterance where its {config.route} chooses the "
            f"expert ({', '.join(config.names)}), but the batch names none: see `Batch.expert`."
        )
    return expert


def named_groups(
    config: ExpertsConfig | None, expert: Tensor | None, layout: PackedLayout
) -> Groups | None:
    """Return the groups of a stack's rows, which all of its layers share."""
    found = named_expert(config, expert)
    if config is None or found is None:
        return None
    return Groups.of_sequences(found, layout, config.count)


class _Permute(Function):
    """Its backward permutes, too, where that of an index would add rows with atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (dx,) = grad_outputs
        (inverse,) = ctx.saved_tensors
        return dx.index_select(0, inverse), None, None
