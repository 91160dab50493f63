"""Definition of `mask_features`: arguments, backends, output shape and examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import BANDS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.forward_only import ForwardOnlyOp


@dataclass(frozen=True, slots=True)
class MaskArguments:
    """Validated arguments of a call; see `effasr_kernels.mask_features.mask_features`."""

    x: Tensor
    lengths: Tensor
    layout: PackedLayout
    rows_per_slot: int
    freq_shares: Tensor | None
    freq_width: int
    time_shares: Tensor | None
    time_width: float


def _shares(masks: int, device: torch.device) -> Tensor:
    return torch.linspace(0, 0.9, 6 * masks, device=device).view(2, 3, masks)


def _example(inputs: ExampleInputs) -> Keywords:
    layout = inputs.frames()
    return {
        "x": inputs.floating(8 * layout.rows, BANDS),
        "lengths": inputs.integers(190, 0, 121, dtype=torch.int64),
        "layout": layout,
        "rows_per_slot": 8,
        "freq_shares": _shares(2, inputs.device),
        "freq_width": 5,
        "time_shares": _shares(4, inputs.device),
        "time_width": 0.1,
    }


OPERATION = ForwardOnlyOp(
    "mask_features",
    MaskArguments,
    {
        Backend.TRITON: "effasr_kernels.mask_features._triton",
        Backend.REFERENCE: "effasr_kernels.mask_features.reference",
    },
    outputs=lambda a: a.x.new_empty(a.x.shape),
    flops=lambda _: 0,
    examples=[Example("mask_features", _example, 0)],
)
