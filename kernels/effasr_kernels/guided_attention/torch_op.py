"""`guided_attention` as torch's dispatcher sees it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend, Op
from effasr_kernels.runtime.flops import pairs
from effasr_kernels.runtime.torch_op import FLOAT, LAYOUT, SEED, TENSOR, Registered
from effasr_kernels.shared.ragged import wide_dtype


def _outputs(q: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=wide_dtype(q))


def _flops(q: Tensor, layout_q: PackedLayout, layout_k: PackedLayout, **_: Any) -> int:
    return 4 * pairs(layout_q, layout_k) * q.shape[1] * q.shape[2]


op = Op(
    "guided_attention",
    {
        Backend.TRITON: "effasr_kernels.guided_attention._triton",
        Backend.REFERENCE: "effasr_kernels.guided_attention.reference",
    },
)

call = Registered(
    op,
    {
        "q": TENSOR,
        "k": TENSOR,
        "v": TENSOR,
        "layout_q": LAYOUT,
        "layout_k": LAYOUT,
        "sigma": FLOAT,
        "scale": FLOAT,
        "dropout": FLOAT,
        "seed": SEED,
    },
    outputs=_outputs,
    flops=_flops,
    returns="(Tensor, Tensor)",
)
