"""The definition of `attention`: arguments, backends, shapes, work and examples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from effasr_kernels.attention.context import Context
from effasr_kernels.attention.order import order
from effasr_kernels.attention.position import RelativeBias, Rotary
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.arguments import Kind
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import FRAMES, HEADS, WIDTH, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.flops import known_lengths, pairs
from effasr_kernels.runtime.torch_op import DifferentiableOp

_ROTARY = Kind(
    ("float[]? {}",),
    lambda rotary: (None if rotary is None else [rotary.base, rotary.fraction],),
    lambda values: None if values is None else Rotary(*values),
)


def _context(left: int, right: int, chunk: int) -> Context:
    return Context(None if left < 0 else left, None if right < 0 else right, chunk)


_CONTEXT = Kind(
    ("int[]? {}",),
    # Schemas have no lists of optional numbers; -1 stands for no limit.
    lambda context: (
        None
        if context is None
        else [-1 if x is None else x for x in (context.left, context.right)] + [context.chunk],
    ),
    lambda values: None if values is None else _context(*values),
)


@dataclass(frozen=True, slots=True)
class AttentionArguments:
    """The arguments of a call, checked; see `effasr_kernels.attention.attention`.

    A position is either in ``rotary`` or in the three tensors of a `RelativeBias`; else all four
    are None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    layout_q: PackedLayout
    layout_k: PackedLayout
    causal: bool
    scale: float
    rotary: Rotary | None = field(metadata={"kind": _ROTARY})
    content_bias: Tensor | None
    position_bias: Tensor | None
    position_table: Tensor | None
    dropout: float
    seed: Tensor | None
    context: Context | None = field(default=None, metadata={"kind": _CONTEXT})

    @property
    def group(self) -> int:
        """Heads of queries that share one head of keys and values."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def relative(self) -> RelativeBias | None:
        """The tensors of a relative position, else None."""
        if self.content_bias is None or self.position_bias is None or self.position_table is None:
            return None
        return RelativeBias(self.content_bias, self.position_bias, self.position_table)


def _flops(a: AttentionArguments) -> int:
    # Scores and weighted sum; a relative position adds one product per pair.
    products = 2 if a.content_bias is None else 3
    if a.context is None:
        seen = pairs(a.layout_q, a.layout_k, a.causal)
    else:
        seen = sum(map(a.context.pairs, known_lengths(a.layout_q)))
    return 2 * products * seen * a.q.shape[1] * a.q.shape[2]


def _self_attention(inputs: ExampleInputs, *, key_heads: int = HEADS, **options: Any) -> Keywords:
    layout = inputs.frames()
    q, k, v = (
        inputs.floating(layout.rows, heads, WIDTH) for heads in (HEADS, key_heads, key_heads)
    )
    return {"q": q, "k": k, "v": v, "layout_q": layout, **options}


def _relative(inputs: ExampleInputs, **options: Any) -> Keywords:
    given = _self_attention(inputs, **options)
    biases = inputs.floating(HEADS, WIDTH), inputs.floating(HEADS, WIDTH)
    table = inputs.floating(2 * max(FRAMES) - 1, HEADS, WIDTH)
    return {**given, "position": RelativeBias(*biases, table)}


OPERATION = DifferentiableOp(
    "attention",
    AttentionArguments,
    {
        Backend.TRITON: "effasr_kernels.attention.triton.backend",
        Backend.VARLEN: "effasr_kernels.attention.backends.varlen",
        Backend.FLASH_ATTN_2: "effasr_kernels.attention.backends.flash_attn:VERSION_2",
        Backend.FLASH_ATTN_3: "effasr_kernels.attention.backends.flash_attn:VERSION_3",
        Backend.FLASH_ATTN_4: "effasr_kernels.attention.backends.flash_attn:VERSION_4",
        Backend.CPP: "effasr_kernels.attention._cpp",
        Backend.REFERENCE: "effasr_kernels.attention.reference",
    },
    order=order,
    outputs=lambda a: a.q.new_empty(a.q.shape),
    flops=_flops,
    examples=[
        Example("attention, relative", _relative, 6 * HEADS * WIDTH * (24 * 24 + 16 * 16)),
        Example(
            "attention, rotary",
            lambda inputs: _self_attention(inputs, position=Rotary()),
            4 * HEADS * WIDTH * (24 * 24 + 16 * 16),
        ),
        Example(
            "attention, causal",
            lambda inputs: _self_attention(inputs, causal=True),
            4 * HEADS * WIDTH * (24 * 25 // 2 + 16 * 17 // 2),
        ),
        Example(
            "attention, grouped queries",
            lambda inputs: _self_attention(inputs, key_heads=1, causal=True, position=Rotary()),
            4 * HEADS * WIDTH * (24 * 25 // 2 + 16 * 17 // 2),
        ),
        Example(
            "attention, relative in chunks",
            lambda inputs: _relative(inputs, context=Context(4, 0, 8)),
            # The first chunk of 8 sees itself, the others 4 keys more.
            6 * HEADS * WIDTH * (8 * (8 + 12 + 12) + 8 * (8 + 12)),
        ),
    ],
)
