"""The definition of `guided_attention`: arguments, backends, shapes, work and examples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import HEADS, WIDTH, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.flops import pairs
from effasr_kernels.runtime.torch_op import DifferentiableOp
from effasr_kernels.shared.ragged import wide_dtype


@dataclass(frozen=True, slots=True)
class GuidedArguments:
    """The arguments of a call, checked; see `effasr_kernels.guided_attention.guided_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout_q: PackedLayout
    layout_k: PackedLayout
    sigma: float
    scale: float
    dropout: float
    seed: Tensor | None


def _outputs(a: GuidedArguments) -> tuple[Tensor, Tensor]:
    return a.q.new_empty(a.q.shape), a.q.new_empty(a.q.shape[:2], dtype=wide_dtype(a.q))


def _example(inputs: ExampleInputs) -> Keywords:
    layout_q, layout_k = inputs.tokens(), inputs.frames()
    rows = layout_q.rows, layout_k.rows, layout_k.rows
    q, k, v = (inputs.floating(count, HEADS, WIDTH) for count in rows)
    return {"q": q, "k": k, "v": v, "layout_q": layout_q, "layout_k": layout_k, "sigma": 0.2}


OPERATION = DifferentiableOp(
    "guided_attention",
    GuidedArguments,
    {
        Backend.TRITON: "effasr_kernels.attention.triton.guided",
        Backend.CPP: "effasr_kernels.guided_attention._cpp",
        Backend.REFERENCE: "effasr_kernels.guided_attention.reference",
    },
    outputs=_outputs,
    flops=lambda a: 4 * pairs(a.layout_q, a.layout_k) * a.q.shape[1] * a.q.shape[2],
    results=2,
    examples=[Example("guided_attention", _example, 4 * HEADS * WIDTH * (5 * 24 + 3 * 16))],
)
