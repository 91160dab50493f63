"""Definition of `rms_norm`: arguments, backends, output shape and examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import DifferentiableOp


@dataclass(frozen=True, slots=True)
class RMSNormArguments:
    """Validated arguments of a call; see `effasr_kernels.rms_norm.rms_norm`.

    Attributes:
        x: (T, W).
        dtype: Name of the dtype of the result.
        frozen: Whether ``weight`` has no gradient, so that none is computed.
    """

    x: Tensor
    weight: Tensor
    eps: float
    offset: int
    dtype: str
    frozen: bool = False

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return getattr(torch, self.dtype)


def _example(inputs: ExampleInputs) -> Keywords:
    return {
        "x": inputs.floating(6, CHANNELS),
        "weight": inputs.floating(CHANNELS),
        "eps": 1e-6,
    }


def _example_with_offset(inputs: ExampleInputs) -> Keywords:
    return {**_example(inputs), "offset": 1}


OPERATION = DifferentiableOp(
    "rms_norm",
    RMSNormArguments,
    {
        Backend.TRITON: "effasr_kernels.rms_norm._triton",
        Backend.REFERENCE: "effasr_kernels.rms_norm.reference",
    },
    outputs=lambda a: a.x.new_empty(a.x.shape, dtype=a.result_dtype),
    # No products: the operation moves bytes.
    flops=lambda a: 0,
    examples=[
        Example("rms_norm", _example, 0),
        Example("rms_norm, offset", _example_with_offset, 0),
    ],
)
