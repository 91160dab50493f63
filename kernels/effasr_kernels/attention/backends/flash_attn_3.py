"""FlashAttention 3, where it is installed, for inference on Hopper GPUs.

Its backward is not used: it hangs on empty sequences, of which every static shape has some
(https://github.com/Dao-AILab/flash-attention/issues/1254), and has been seen to differ from run to
run where asked to be deterministic (issue 2244). Its loads do not end where a sequence does: unlike
with other implementations, NaN in a sequence can reach the one before it.
"""

from __future__ import annotations

from torch import Tensor

from effasr_kernels.attention.backends import packages
from effasr_kernels.attention.definition import AttentionArguments

_FUNCTION = (
    "flash_attn_interface",
    "flash_attn_varlen_func",
    "flash-attn-3",
    packages.PARAMETERS,
)
_HOPPER = (9, 0)


def unsupported_reason(a: AttentionArguments) -> str | None:
    """Why it cannot serve the call, or None."""
    function = packages.find(*_FUNCTION)
    if isinstance(function, str):
        return function
    reason = packages.refusal(a)
    if reason is None and packages.capability(a.q.device) != _HOPPER:
        return "needs compute capability 9.0, an H100 or H200"
    # Not whether autograd records: torch.compile and torch.library ask with autograd off.
    if reason is None and any(x.requires_grad for x in (a.q, a.k, a.v)):
        return "serves inference alone: its backward hangs on empty sequences, and may not repeat"
    return reason


def run(a: AttentionArguments) -> Tensor:
    """See `effasr_kernels.attention.attention`."""
    return packages.guarded(packages.find(*_FUNCTION), a, reads_beyond=True)
