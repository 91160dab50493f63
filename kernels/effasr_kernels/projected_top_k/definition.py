"""Definition of `projected_top_k`: arguments, backends, output shapes, FLOPs and examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, CLASSES, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.forward_only import ForwardOnlyOp
from effasr_kernels.shared.ragged import wide_dtype


@dataclass(frozen=True, slots=True)
class TopKArguments:
    """Validated arguments of a call; see `effasr_kernels.projected_top_k.projected_top_k`."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    k: int
    classes: int


def _outputs(a: TopKArguments) -> tuple[Tensor, ...]:
    shape = a.hidden.shape[0], a.k
    return (
        a.hidden.new_empty(shape, dtype=wide_dtype(a.hidden)),
        a.hidden.new_empty(shape, dtype=torch.int64),
    )


def _example(inputs: ExampleInputs) -> Keywords:
    return {
        "hidden": inputs.floating(4, CHANNELS),
        "weight": inputs.floating(CLASSES, CHANNELS),
        "bias": inputs.floating(CLASSES),
        "k": 2,
        "classes": CLASSES - 1,
    }


OPERATION = ForwardOnlyOp(
    "projected_top_k",
    TopKArguments,
    {
        Backend.TRITON: "effasr_kernels.projected_top_k._triton",
        Backend.REFERENCE: "effasr_kernels.projected_top_k.reference",
    },
    outputs=_outputs,
    flops=lambda a: 2 * a.hidden.numel() * a.classes,
    results=2,
    examples=[Example("projected_top_k", _example, 2 * 4 * (CLASSES - 1) * CHANNELS)],
)
