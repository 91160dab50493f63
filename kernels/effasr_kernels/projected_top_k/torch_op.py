"""`projected_top_k` as torch's dispatcher sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from effasr_kernels.runtime.dispatch import Backend, Op
from effasr_kernels.runtime.forward_only import ForwardOnly
from effasr_kernels.runtime.torch_op import INT, OPTIONAL_TENSOR, TENSOR
from effasr_kernels.shared.ragged import wide_dtype


def _outputs(hidden: Tensor, k: int, **_: Any) -> tuple[Tensor, ...]:
    shape = hidden.shape[0], k
    return (
        hidden.new_empty(shape, dtype=wide_dtype(hidden)),
        hidden.new_empty(shape, dtype=torch.int64),
    )


def _flops(hidden: Tensor, classes: int, **_: Any) -> int:
    return 2 * hidden.numel() * classes


op = Op(
    "projected_top_k",
    {
        Backend.TRITON: "effasr_kernels.projected_top_k._triton",
        Backend.REFERENCE: "effasr_kernels.projected_top_k.reference",
    },
)

call = ForwardOnly(
    op,
    {
        "hidden": TENSOR,
        "weight": TENSOR,
        "bias": OPTIONAL_TENSOR,
        "k": INT,
        "classes": INT,
    },
    outputs=_outputs,
    flops=_flops,
    results=2,
)
