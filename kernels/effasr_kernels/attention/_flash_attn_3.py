"""FlashAttention 3, where it is installed, for inference on Hopper GPUs.

Its backward is not used: it hangs on empty sequences, of which every static shape has some
(https://github.com/Dao-AILab/flash-attention/issues/1254), and has been seen to differ from run to
run where asked to be deterministic (issue 2244). Its loads do not end where a sequence does: unlike
with other implementations, NaN in a sequence can reach the one before it.
"""

from __future__ import annotations

from torch import Tensor

from effasr_kernels.attention import packages
from effasr_kernels.attention.position import RelativeBias, Rotary
from effasr_kernels.packed import PackedLayout

_FUNCTION = (
    "flash_attn_interface",
    "flash_attn_varlen_func",
    "flash-attn-3",
    packages.PARAMETERS,
)
_HOPPER = (9, 0)


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
    if reason is None and packages.capability(q.device) != _HOPPER:
        return "needs compute capability 9.0, an H100 or H200"
    # Not whether autograd records: torch.compile and torch.library ask with autograd off.
    if reason is None and any(x.requires_grad for x in (q, k, v)):
        return "serves inference alone: its backward hangs on empty sequences, and may not repeat"
    return reason


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
