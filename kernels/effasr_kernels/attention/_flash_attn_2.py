"""FlashAttention 2, where it is installed: https://github.com/Dao-AILab/flash-attention.

Its loads end where a sequence does, so that NaN elsewhere stays there. Its backward sums dQ by
atomics unless asked to be deterministic, as it is here.
"""

from __future__ import annotations

from torch import Tensor

from effasr_kernels.attention import packages
from effasr_kernels.attention.position import RelativeBias, Rotary
from effasr_kernels.packed import PackedLayout

_FUNCTION = ("flash_attn", "flash_attn_varlen_func", "flash-attn", packages.PARAMETERS)


def why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_q: PackedLayout,
    layout_k: PackedLayout,
    *,
    causal: bool,
    scale: float,
    position: Rotary | RelativeBias | None,
    dropout: float,
    seed: int | Tensor | None,
) -> str | None:
    """Why it cannot serve the call, or None."""
    function = packages.find(*_FUNCTION)
    if isinstance(function, str):
        return function
    return packages.refusal(
        q, layout_q, layout_k, causal=causal, position=position, dropout=dropout
    )


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_q: PackedLayout,
    layout_k: PackedLayout,
    *,
    causal: bool,
    scale: float,
    position: Rotary | RelativeBias | None,
    dropout: float,
    seed: int | Tensor | None,
) -> Tensor:
    """See `effasr_kernels.attention.attention`."""
    function = packages.find(*_FUNCTION)
    if isinstance(function, str):
        raise RuntimeError(function)
    return packages.guarded(
        function, q, k, v, layout_q, layout_k, causal=causal, scale=scale, reads_beyond=False
    )
