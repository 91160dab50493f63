"""The definition of `decode_attention`: arguments, backends, shapes, work and examples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import HEADS, WIDTH, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.forward_only import ForwardOnlyOp


@dataclass(frozen=True, slots=True)
class DecodeArguments:
    """The arguments of a call, checked; see `effasr_kernels.decode_attention.decode_attention`."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    lengths: Tensor
    new_k: Tensor | None
    new_v: Tensor | None
    scale: float
    splits: int | None


def _flops(a: DecodeArguments) -> int:
    sequences, pages = a.page_table.shape
    if is_fake(a.lengths):
        # Lengths are not known; the pages are full at most.
        keys = sequences * pages * a.k_pages.shape[1]
    else:
        keys = int(a.lengths.clamp(min=0).sum())
    return 4 * keys * a.q.numel() // max(1, sequences)


def _example(inputs: ExampleInputs, hypotheses: int = 1, share: int = 1) -> Keywords:
    return {
        "q": inputs.floating(3 * hypotheses, share * HEADS, WIDTH),
        "k_pages": inputs.floating(6, 16, HEADS, WIDTH),
        "v_pages": inputs.floating(6, 16, HEADS, WIDTH),
        "page_table": inputs.integers([5, 1], [0, 0], [2, 4]),
        "lengths": inputs.integers(24, 0, 16),
        "splits": 2,
    }


def _self_attention(inputs: ExampleInputs, share: int = 1) -> Keywords:
    given = _example(inputs, share=share)
    new = {name: inputs.floating(3, HEADS, WIDTH) for name in ("new_k", "new_v")}
    return {**given, **new}


OPERATION = ForwardOnlyOp(
    "decode_attention",
    DecodeArguments,
    {
        Backend.TRITON: "effasr_kernels.decode_attention._triton",
        Backend.REFERENCE: "effasr_kernels.decode_attention.reference",
    },
    outputs=lambda a: a.q.new_empty(a.q.shape),
    flops=_flops,
    written=("k_pages", "v_pages"),
    written_with="new_k",
    examples=[
        Example("decode_attention, self", _self_attention, 4 * HEADS * WIDTH * 40),
        Example(
            "decode_attention, grouped queries",
            lambda inputs: _self_attention(inputs, share=2),
            4 * 2 * HEADS * WIDTH * 40,
        ),
        Example(
            "decode_attention, cross",
            lambda inputs: _example(inputs, hypotheses=4),
            4 * HEADS * WIDTH * 4 * 40,
        ),
    ],
)
