"""FlashAttention 4, where it is installed, for Hopper and Blackwell GPUs.

Its arguments have moved between versions, and are passed by name. Its loads do not end where a
sequence does: unlike with other implementations, NaN in a sequence can reach the one before it.
"""

from __future__ import annotations

from torch import Tensor

from effasr_kernels.attention import packages
from effasr_kernels.attention.position import RelativeBias, Rotary
from effasr_kernels.packed import PackedLayout

_FUNCTION = ("flash_attn.cute", "flash_attn_varlen_func", "flash-attn-4", packages.PARAMETERS)
_HOPPER, _BLACKWELL = 9, (10, 11)
_WIDEST_ON_BLACKWELL = 128


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
    reason = packages.refusal(
        q, layout_q, layout_k, causal=causal, position=position, dropout=dropout
    )
    if reason is not None:
        return reason
    major = (packages.capability(q.device) or (0, 0))[0]
    if major != _HOPPER and major not in _BLACKWELL:
        return "needs compute capability 9, 10 or 11, an H100 or later"
    if major in _BLACKWELL and q.shape[-1] > _WIDEST_ON_BLACKWELL:
        return f"serves head widths up to {_WIDEST_ON_BLACKWELL} on this GPU, not {q.shape[-1]}"
    return None


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
        function, q, k, v, layout_q, layout_k, causal=causal, scale=scale, reads_beyond=True
    )
