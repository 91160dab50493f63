"""`decode_attention` as torch's dispatcher sees it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from effasr_kernels.runtime.dispatch import Backend, Op
from effasr_kernels.runtime.forward_only import ForwardOnly
from effasr_kernels.runtime.torch_op import FLOAT, OPTIONAL_TENSOR, TENSOR, plain


def _outputs(q: Tensor, **_: Any) -> Tensor:
    return q.new_empty(q.shape)


def _flops(q: Tensor, k_pages: Tensor, page_table: Tensor, lengths: Tensor, **_: Any) -> int:
    sequences, pages = page_table.shape
    if is_fake(lengths):
        # Lengths are not known; the pages are full at most.
        keys = sequences * pages * k_pages.shape[1]
    else:
        keys = int(lengths.clamp(min=0).sum())
    return 4 * keys * q.numel() // max(1, sequences)


op = Op(
    "decode_attention",
    {
        Backend.TRITON: "effasr_kernels.decode_attention._triton",
        Backend.REFERENCE: "effasr_kernels.decode_attention.reference",
    },
)

call = ForwardOnly(
    op,
    {
        "q": TENSOR,
        "k_pages": TENSOR,
        "v_pages": TENSOR,
        "page_table": TENSOR,
        "lengths": TENSOR,
        "new_k": OPTIONAL_TENSOR,
        "new_v": OPTIONAL_TENSOR,
        "scale": FLOAT,
        "splits": plain("int?"),
    },
    outputs=_outputs,
    flops=_flops,
    written=("k_pages", "v_pages"),
    written_with="new_k",
)
