"""FlashAttention 2, 3 and 4, if installed: https://github.com/Dao-AILab/flash-attention.

Version 2 does not load rows past the end of a sequence, so NaN in one sequence does not affect
others. Versions 3 and 4 do: with them, NaN in a sequence can reach the previous sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.attention import AttentionArguments
from effasr_kernels.attention.backends import packages


@dataclass(frozen=True, slots=True)
class FlashAttention:
    module: str  # module of its `flash_attn_varlen_func`
    package: str  # name of the package to install
    reads_beyond: bool  # see `packages.guarded`
    refusal: Callable[[AttentionArguments], str | None] = lambda a: None  # why it cannot compute it

    def unsupported_reason(self, a: AttentionArguments) -> str | None:
        function = self._find()
        if isinstance(function, str):
            return function
        return packages.refusal(a) or self.refusal(a)

    def run(self, a: AttentionArguments) -> Tensor:
        return packages.guarded(self._find(), a, reads_beyond=self.reads_beyond)

    def _find(self) -> Callable[..., object] | str:
        # Positions of arguments differ between versions, so they are passed by name.
        name = "flash_attn_varlen_func"
        return packages.find(self.module, name, self.package, packages.PARAMETERS)


def _inference_on_hopper(a: AttentionArguments) -> str | None:
    if packages.capability(a.q.device) != (9, 0):
        return "needs compute capability 9.0, an H100 or H200"
    # The backward hangs on empty sequences, which every static shape has (issue 1254), and was
    # reported to be irreproducible in deterministic mode (issue 2244). Grad mode is not checked, as
    # torch.compile and torch.library disable it here.
    if any(x.requires_grad for x in (a.q, a.k, a.v)):
        return (
            "supports only inference: its backward hangs on empty sequences and may be "
            "irreproducible"
        )
    return None


def _hopper_or_blackwell(a: AttentionArguments) -> str | None:
    major, width = (packages.capability(a.q.device) or (0, 0))[0], a.q.shape[-1]
    if major not in (9, 10, 11):
        return "needs compute capability 9, 10 or 11, an H100 or later"
    if major != 9 and width > 128:
        return f"supports head widths up to 128 on this GPU, not {width}"
    return None


VERSION_2 = FlashAttention("flash_attn", "flash-attn", reads_beyond=False)
VERSION_3 = FlashAttention("flash_attn_interface", "flash-attn-3", True, _inference_on_hopper)
VERSION_4 = FlashAttention("flash_attn.cute", "flash-attn-4", True, _hopper_or_blackwell)
