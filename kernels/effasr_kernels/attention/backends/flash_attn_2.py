"""FlashAttention 2, where it is installed: https://github.com/Dao-AILab/flash-attention.

Its loads end where a sequence does, so that NaN elsewhere stays there. Its backward sums dQ by
atomics unless asked to be deterministic, as it is here.
"""

from __future__ import annotations

from torch import Tensor

from effasr_kernels.attention.backends import packages
from effasr_kernels.attention.definition import AttentionArguments

_FUNCTION = ("flash_attn", "flash_attn_varlen_func", "flash-attn", packages.PARAMETERS)


def unsupported_reason(a: AttentionArguments) -> str | None:
    """Why it cannot serve the call, or None."""
    function = packages.find(*_FUNCTION)
    if isinstance(function, str):
        return function
    return packages.refusal(a)


def run(a: AttentionArguments) -> Tensor:
    """See `effasr_kernels.attention.attention`."""
    return packages.guarded(packages.find(*_FUNCTION), a, reads_beyond=False)
