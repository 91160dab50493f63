"""Definition of `dropout_add_layer_norm`: arguments, backends, output shapes and examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import DifferentiableOp


@dataclass(frozen=True, slots=True)
class NormArguments:
    """Validated arguments of a call.

    See `effasr_kernels.dropout_add_layer_norm.dropout_add_layer_norm`.

    Attributes:
        has_branch: Whether ``x`` is given; the backward does not see it.
        dtype: Name of the dtype of ``x``, or without ``x`` of what a pre-norm returns.
        x_bias: Added to ``x``.
    """

    residual: Tensor
    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    seed: Tensor | None
    layout: PackedLayout
    scale: float
    dropout: float
    eps: float
    prenorm: bool
    offset: int
    has_branch: bool
    dtype: str
    x_bias: Tensor | None = None

    @property
    def narrow_dtype(self) -> torch.dtype:
        """The dtype of ``x`` and of what a pre-norm returns."""
        return getattr(torch, self.dtype)

    @property
    def normed_dtype(self) -> torch.dtype:
        """The dtype of the normalized result."""
        return self.narrow_dtype if self.prenorm else self.residual.dtype


def _outputs(a: NormArguments) -> tuple[Tensor, Tensor]:
    none = a.residual.new_empty(0)
    normed = none
    if a.weight is not None:
        normed = a.residual.new_empty(a.residual.shape, dtype=a.normed_dtype)
    return normed, a.residual.new_empty(a.residual.shape) if a.prenorm else none


def _unread(a: NormArguments) -> tuple[str, ...]:
    """The sum is a result and holds what the backward needs, unless the norm replaces it."""
    return ("x", "residual", "bias") if a.prenorm else ("bias",)


def _example(inputs: ExampleInputs) -> Keywords:
    layout = inputs.frames()
    return {
        "x": inputs.floating(layout.rows, CHANNELS),
        "residual": inputs.floating(layout.rows, CHANNELS),
        "weight": inputs.floating(CHANNELS),
        "bias": inputs.floating(CHANNELS),
        "layout": layout,
        "scale": 0.5,
    }


def _example_post_norm(inputs: ExampleInputs) -> Keywords:
    return {**_example(inputs), "x_bias": inputs.floating(CHANNELS), "prenorm": False}


OPERATION = DifferentiableOp(
    "dropout_add_layer_norm",
    NormArguments,
    {
        Backend.TRITON: "effasr_kernels.dropout_add_layer_norm._triton",
        Backend.REFERENCE: "effasr_kernels.dropout_add_layer_norm.reference",
    },
    outputs=_outputs,
    # No products: the operation moves bytes.
    flops=lambda a: 0,
    results=2,
    unread=_unread,
    examples=[
        Example("dropout_add_layer_norm", _example, 0),
        Example("dropout_add_layer_norm, post-norm", _example_post_norm, 0),
    ],
)
