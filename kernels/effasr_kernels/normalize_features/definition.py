"""Definition of `normalize_features`: arguments, backends, output shape and examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import BANDS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.forward_only import ForwardOnlyOp


@dataclass(frozen=True, slots=True)
class NormalizeArguments:
    """Validated arguments of a call; see `effasr_kernels.normalize_features.normalize_features`."""

    x: Tensor
    lengths: Tensor
    layout: PackedLayout
    rows_per_slot: int
    eps: float


def _example(inputs: ExampleInputs) -> Keywords:
    layout = inputs.frames()
    return {
        "x": inputs.floating(8 * layout.rows, BANDS),
        "lengths": inputs.integers(190, 0, 121, dtype=torch.int64),
        "layout": layout,
        "rows_per_slot": 8,
    }


OPERATION = ForwardOnlyOp(
    "normalize_features",
    NormalizeArguments,
    {
        Backend.TRITON: "effasr_kernels.normalize_features._triton",
        Backend.REFERENCE: "effasr_kernels.normalize_features.reference",
    },
    outputs=lambda a: a.x.new_empty(a.x.shape),
    flops=lambda _: 0,
    examples=[Example("normalize_features", _example, 0)],
)
