"""The order in which backends of `attention` are tried: by measurement, where there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from effasr_kernels.runtime.dispatch import Backend

UNMEASURED = (
    Backend.TRITON,
    Backend.VARLEN,
    Backend.FLASH_ATTN_2,
    Backend.FLASH_ATTN_4,
    Backend.CPP,
    Backend.REFERENCE,
)
"""The order without measurements. ``triton`` is first, as it supports the whole contract.

FlashAttention 3 runs only on request: it supports inference but not training, and compiled code
cannot distinguish the two when it runs.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A measured order for one compute capability and calls up to a size."""

    capability: tuple[int, int]  # compute capability
    dtype: torch.dtype  # dtype of the queries
    head_width: int  # largest measured width of a head
    longest: int  # longest measured sequence
    backends: tuple[Backend, ...]  # from the fastest on; the others follow as in `UNMEASURED`
    source: str  # file and commit of the measurements: ``profiling/results/ops.csv@1a2b3c``


MEASURED: tuple[Row, ...] = ()
"""Measured orders; the first row that covers a call applies. Nothing has been measured yet."""


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an available NVIDIA GPU; None for any other device."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def order(a: Any) -> tuple[Backend, ...]:
    """The backends to try for `AttentionArguments`, which are defined above this module."""
    gpu = capability(a.q.device) if MEASURED else None
    if gpu is None:
        return UNMEASURED
    longest = max(a.layout_q.max_seqlen_bound, a.layout_k.max_seqlen_bound)
    for row in MEASURED:
        covers = a.q.shape[-1] <= row.head_width and longest <= row.longest
        if row.capability == gpu and row.dtype == a.q.dtype and covers:
            return (*row.backends, *(b for b in UNMEASURED if b not in row.backends))
    return UNMEASURED
