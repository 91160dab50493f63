"""The definition of `append_to_pages`: arguments, backends, shapes, work and examples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import HEADS, WIDTH, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.forward_only import ForwardOnlyOp


@dataclass(frozen=True, slots=True)
class AppendArguments:
    """The arguments of a call, checked; see `effasr_kernels.append_to_pages.append_to_pages`."""

    k: Tensor
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    positions: Tensor


def _example(inputs: ExampleInputs) -> Keywords:
    return {
        "k": inputs.floating(3, HEADS, WIDTH),
        "v": inputs.floating(3, HEADS, WIDTH),
        "k_pages": inputs.floating(6, 16, HEADS, WIDTH),
        "v_pages": inputs.floating(6, 16, HEADS, WIDTH),
        "page_table": inputs.integers([5, 1], [0, 0], [2, 4]),
        "positions": inputs.integers(23, -1, 15),
    }


OPERATION = ForwardOnlyOp(
    "append_to_pages",
    AppendArguments,
    {
        Backend.TRITON: "effasr_kernels.append_to_pages._triton",
        Backend.REFERENCE: "effasr_kernels.append_to_pages.reference",
    },
    outputs=lambda _: None,
    flops=lambda _: 0,
    results=0,
    written=("k_pages", "v_pages"),
    examples=[Example("append_to_pages", _example, 0)],
)
