"""FlashAttention 4, where it is installed, for Hopper and Blackwell GPUs.

Its arguments have moved between versions, and are passed by name. Its loads do not end where a
sequence does: unlike with other implementations, NaN in a sequence can reach the one before it.
"""

from __future__ import annotations

from torch import Tensor

from effasr_kernels.attention.backends import packages
from effasr_kernels.attention.definition import AttentionArguments

_FUNCTION = ("flash_attn.cute", "flash_attn_varlen_func", "flash-attn-4", packages.PARAMETERS)
_HOPPER, _BLACKWELL = 9, (10, 11)
_WIDEST_ON_BLACKWELL = 128


def unsupported_reason(a: AttentionArguments) -> str | None:
    """Why it cannot serve the call, or None."""
    function = packages.find(*_FUNCTION)
    if isinstance(function, str):
        return function
    reason = packages.refusal(a)
    if reason is not None:
        return reason
    major = (packages.capability(a.q.device) or (0, 0))[0]
    if major != _HOPPER and major not in _BLACKWELL:
        return "needs compute capability 9, 10 or 11, an H100 or later"
    if major in _BLACKWELL and a.q.shape[-1] > _WIDEST_ON_BLACKWELL:
        return f"serves head widths up to {_WIDEST_ON_BLACKWELL} on this GPU, not {a.q.shape[-1]}"
    return None


def run(a: AttentionArguments) -> Tensor:
    """See `effasr_kernels.attention.attention`."""
    return packages.guarded(packages.find(*_FUNCTION), a, reads_beyond=True)
