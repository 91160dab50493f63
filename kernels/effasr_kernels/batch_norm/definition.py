"""Definition of `batch_norm`: arguments, backends, output shapes, FLOPs and examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import DifferentiableOp


@dataclass(frozen=True, slots=True)
class BatchNormArguments:
    """Validated arguments of a call; see `effasr_kernels.batch_norm.batch_norm`."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    mean: Tensor
    variance: Tensor
    layout: PackedLayout
    eps: float
    silu: bool
    fixed: bool


def _example(inputs: ExampleInputs, **options: Any) -> Keywords:
    layout = inputs.frames()
    return {
        "x": inputs.floating(layout.rows, CHANNELS),
        "weight": inputs.floating(CHANNELS),
        "bias": inputs.floating(CHANNELS),
        # Without a gradient, as the statistics of every call.
        "mean": inputs.integers(*[0] * CHANNELS, dtype=torch.float32),
        "variance": inputs.integers(*[1] * CHANNELS, dtype=torch.float32),
        "layout": layout,
        **options,
    }


OPERATION = DifferentiableOp(
    "batch_norm",
    BatchNormArguments,
    {
        Backend.TRITON: "effasr_kernels.batch_norm._triton",
        Backend.REFERENCE: "effasr_kernels.batch_norm.reference",
    },
    outputs=lambda a: a.x.new_empty(a.x.shape),
    # It has no matrix product.
    flops=lambda a: 0,
    examples=[
        Example("batch_norm, silu", lambda inputs: _example(inputs, silu=True), 0),
        Example("batch_norm, fixed", lambda inputs: _example(inputs, fixed=True), 0),
    ],
)
