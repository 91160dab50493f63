"""`attention` as torch's dispatcher sees it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from effasr_kernels.attention.order import order
from effasr_kernels.attention.position import RelativeBias, Rotary
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend, Op
from effasr_kernels.runtime.flops import pairs
from effasr_kernels.runtime.torch_op import BOOL, FLOAT, LAYOUT, SEED, TENSOR, Kind, Registered


def _flatten(position: Rotary | RelativeBias | None) -> tuple[Any, ...]:
    if isinstance(position, Rotary):
        return None, None, None, [position.base, position.fraction]
    if isinstance(position, RelativeBias):
        return position.content_bias, position.position_bias, position.table, None
    return None, None, None, None


def _restore(
    content_bias: Tensor | None,
    position_bias: Tensor | None,
    table: Tensor | None,
    rotary: list[float] | None,
) -> Rotary | RelativeBias | None:
    if rotary is not None:
        return Rotary(*rotary)
    if content_bias is None or position_bias is None or table is None:
        return None
    return RelativeBias(content_bias, position_bias, table)


def _outputs(q: Tensor, **_: Any) -> Tensor:
    return q.new_empty(q.shape)


def _flops(
    q: Tensor,
    layout_q: PackedLayout,
    layout_k: PackedLayout,
    causal: bool,
    position: Rotary | RelativeBias | None,
    **_: Any,
) -> int:
    # Scores and weighted sum; a relative position is one more product for each pair.
    products = 3 if isinstance(position, RelativeBias) else 2
    return 2 * products * pairs(layout_q, layout_k, causal) * q.shape[1] * q.shape[2]


op = Op(
    "attention",
    {
        Backend.TRITON: "effasr_kernels.attention._triton",
        Backend.VARLEN: "effasr_kernels.attention._varlen",
        Backend.FLASH_ATTN_2: "effasr_kernels.attention._flash_attn_2",
        Backend.FLASH_ATTN_3: "effasr_kernels.attention._flash_attn_3",
        Backend.FLASH_ATTN_4: "effasr_kernels.attention._flash_attn_4",
        Backend.REFERENCE: "effasr_kernels.attention.reference",
    },
    order,
)

call = Registered(
    op,
    {
        "q": TENSOR,
        "k": TENSOR,
        "v": TENSOR,
        "layout_q": LAYOUT,
        "layout_k": LAYOUT,
        "causal": BOOL,
        "scale": FLOAT,
        "position": Kind(
            (
                "Tensor? {}_content_bias",
                "Tensor? {}_bias",
                "Tensor? {}_table",
                "float[]? {}_rotary",
            ),
            _flatten,
            _restore,
        ),
        "dropout": FLOAT,
        "seed": SEED,
    },
    outputs=_outputs,
    flops=_flops,
)
