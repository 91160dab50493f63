"""Which implementation of `attention` to try first: by measurement, where there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from effasr_kernels.attention.backends.packages import capability
from effasr_kernels.runtime.dispatch import Backend

if TYPE_CHECKING:
    from effasr_kernels.attention.definition import AttentionArguments

UNMEASURED = (
    Backend.TRITON,
    Backend.VARLEN,
    Backend.FLASH_ATTN_2,
    Backend.FLASH_ATTN_4,
    Backend.CPP,
    Backend.REFERENCE,
)
"""Our own first, which keeps every promise; the others serve where it refuses. On CPUs, ``cpp``.

FlashAttention 3 runs on request alone: it serves inference but not training, and compiled code
cannot tell the two apart when it runs.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A measured order, for one kind of GPU and calls up to a size.

    Attributes:
        capability: The compute capability.
        dtype: Of the queries.
        head_width: The widest head that was measured.
        longest: The longest sequence that was measured.
        backends: From the fastest on; what is not named comes behind, as in `UNMEASURED`.
        source: The file of the measurements and the commit: ``profiling/results/ops.csv@1a2b3c``.
    """

    capability: tuple[int, int]
    dtype: torch.dtype
    head_width: int
    longest: int
    backends: tuple[Backend, ...]
    source: str


MEASURED: tuple[Row, ...] = ()
"""The first row that covers a call decides. Nothing has been measured yet."""


def order(a: AttentionArguments) -> tuple[Backend, ...]:
    """The backends for a call of `attention`, in the order in which to try them."""
    found = capability(a.q.device) if MEASURED else None
    if found is None:
        return UNMEASURED
    longest = max(a.layout_q.max_seqlen_bound, a.layout_k.max_seqlen_bound)
    for row in MEASURED:
        fits = a.q.shape[-1] <= row.head_width and longest <= row.longest
        if row.capability == found and row.dtype == a.q.dtype and fits:
            return (*row.backends, *(b for b in UNMEASURED if b not in row.backends))
    return UNMEASURED
