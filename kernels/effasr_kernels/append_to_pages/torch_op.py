"""`append_to_pages` as torch's dispatcher sees it."""

from __future__ import annotations

from typing import Any

from effasr_kernels.runtime.dispatch import Backend, Op
from effasr_kernels.runtime.forward_only import ForwardOnly
from effasr_kernels.runtime.torch_op import TENSOR

op = Op(
    "append_to_pages",
    {
        Backend.TRITON: "effasr_kernels.append_to_pages._triton",
        Backend.REFERENCE: "effasr_kernels.append_to_pages.reference",
    },
)


def _flops(**_: Any) -> int:
    return 0


call = ForwardOnly(
    op,
    {
        "k": TENSOR,
        "v": TENSOR,
        "k_pages": TENSOR,
        "v_pages": TENSOR,
        "page_table": TENSOR,
        "positions": TENSOR,
    },
    outputs=lambda **_: None,
    flops=_flops,
    results=0,
    written=("k_pages", "v_pages"),
)
