"""Definition of `update_running_statistics`: arguments, backends, output shapes and examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.forward_only import ForwardOnlyOp


@dataclass(frozen=True, slots=True)
class UpdateArguments:
    """Validated arguments of a call.

    See `effasr_kernels.update_running_statistics.update_running_statistics`.
    """

    running_mean: Tensor
    running_variance: Tensor
    num_batches: Tensor
    mean: Tensor
    variance: Tensor
    layout: PackedLayout
    momentum: float


def _example(inputs: ExampleInputs) -> Keywords:
    running_mean, running_variance, mean, variance = (inputs.floating(CHANNELS) for _ in range(4))
    return {
        "running_mean": running_mean,
        "running_variance": running_variance,
        "num_batches": torch.tensor(3, device=inputs.device),
        "mean": mean,
        "variance": variance,
        "layout": inputs.frames(),
    }


OPERATION = ForwardOnlyOp(
    "update_running_statistics",
    UpdateArguments,
    {
        Backend.TRITON: "effasr_kernels.update_running_statistics._triton",
        Backend.REFERENCE: "effasr_kernels.update_running_statistics.reference",
    },
    outputs=lambda _: None,
    flops=lambda _: 0,
    results=0,
    written=("running_mean", "running_variance", "num_batches"),
    examples=[Example("update_running_statistics", _example, 0)],
)
