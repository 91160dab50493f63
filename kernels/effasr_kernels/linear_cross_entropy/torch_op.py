"""`linear_cross_entropy` as torch's dispatcher sees it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from effasr_kernels.runtime.dispatch import Backend, Op
from effasr_kernels.runtime.torch_op import FLOAT, INT, OPTIONAL_TENSOR, TENSOR, Registered
from effasr_kernels.shared.ragged import wide_dtype


def _outputs(hidden: Tensor, **_: Any) -> Tensor:
    return hidden.new_empty(hidden.shape[0], dtype=wide_dtype(hidden))


def _flops(weight: Tensor, targets: Tensor, ignore_index: int, **_: Any) -> int:
    fake = is_fake(targets)
    rows = targets.shape[0] if fake else int((targets != ignore_index).sum())
    return 2 * rows * weight.numel()


op = Op(
    "linear_cross_entropy",
    {
        Backend.TRITON: "effasr_kernels.linear_cross_entropy._triton",
        Backend.REFERENCE: "effasr_kernels.linear_cross_entropy.reference",
    },
)

call = Registered(
    op,
    {
        "hidden": TENSOR,
        "weight": TENSOR,
        "targets": TENSOR,
        "bias": OPTIONAL_TENSOR,
        "label_smoothing": FLOAT,
        "ignore_index": INT,
        "z_loss": FLOAT,
    },
    outputs=_outputs,
    flops=_flops,
)
