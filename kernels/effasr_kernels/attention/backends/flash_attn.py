"""FlashAttention 2, 3 and 4, where installed: https://github.com/Dao-AILab/flash-attention.

The loads of version 2 end where a sequence does, so that NaN elsewhere stays there. Those of 3 and
4 do not: unlike with other implementations, NaN in a sequence can reach the one before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.attention.backends import packages
from effasr_kernels.attention.definition import AttentionArguments


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """One version, as an implementation of `attention`.

    Attributes:
        module: Where its ``flash_attn_varlen_func`` is.
        package: What to install for it.
        reads_beyond: See `packages.guarded`.
        refusal: Why this version cannot serve a call that the others may serve, or None.
    """

    module: str
    package: str
    reads_beyond: bool
    refusal: Callable[[AttentionArguments], str | None] = lambda a: None

    def unsupported_reason(self, a: AttentionArguments) -> str | None:
        """Why it cannot serve the call, or None."""
        function = self._find()
        if isinstance(function, str):
            return function
        return packages.refusal(a) or self.refusal(a)

    def run(self, a: AttentionArguments) -> Tensor:
        """See `effasr_kernels.attention.attention`."""
        return packages.guarded(self._find(), a, reads_beyond=self.reads_beyond)

    def _find(self) -> Callable[..., object] | str:
        # Arguments have moved between versions, and are passed by name.
        name = "flash_attn_varlen_func"
        return packages.find(self.module, name, self.package, packages.PARAMETERS)


def _inference_on_hopper(a: AttentionArguments) -> str | None:
    if packages.capability(a.q.device) != (9, 0):
        return "needs compute capability 9.0, an H100 or H200"
    # The backward hangs on empty sequences, of which every static shape has some (issue 1254), and
    # has been seen to differ from run to run where asked to be deterministic (issue 2244). Not
    # whether autograd records: torch.compile and torch.library ask with autograd off.
    if any(x.requires_grad for x in (a.q, a.k, a.v)):
        return "serves inference alone: its backward hangs on empty sequences, and may not repeat"
    return None


def _hopper_or_blackwell(a: AttentionArguments) -> str | None:
    major, width = (packages.capability(a.q.device) or (0, 0))[0], a.q.shape[-1]
    if major not in (9, 10, 11):
        return "needs compute capability 9, 10 or 11, an H100 or later"
    if major != 9 and width > 128:
        return f"serves head widths up to 128 on this GPU, not {width}"
    return None


VERSION_2 = FlashAttention("flash_attn", "flash-attn", reads_beyond=False)
VERSION_3 = FlashAttention("flash_attn_interface", "flash-attn-3", True, _inference_on_hopper)
VERSION_4 = FlashAttention("flash_attn.cute", "flash-attn-4", True, _hopper_or_blackwell)
