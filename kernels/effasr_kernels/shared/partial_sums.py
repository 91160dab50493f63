"""Sums of the partial sums that the programs of a kernel write, rounded in the same launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.runtime.launch import launch

_ELEMENTS = 2_048
"""Elements of a step: 16 for each thread."""


def summed(partials: Tensor, dtype: torch.dtype, *, rows: int = 64) -> Tensor:
    """Return ``partials.sum(0).to(dtype)``, added in a fixed order, in one launch.

    Args:
        partials: float32 (P, ...), contiguous.
        dtype: Dtype of the result.
        rows: Partial sums that a program adds at a time, a power of two up to 64: few if P is
            small, because masked loads fill the rest.

    Returns:
        (...), contiguous; zeros if P is 0.
    """
    out = partials.new_empty(partials.shape[1:], dtype=dtype)
    _launch(partials, out, None, rows)
    return out


def summed_parts(
    partials: Tensor, dtype: torch.dtype, last_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the sums of S numbers per channel, of which the last has a dtype of its own.

    Args:
        partials: float32 (P, S, C), contiguous.
        dtype: Dtype of the first S - 1.
        last_dtype: Dtype of the last.

    Returns:
        (S - 1, C) and (C,), contiguous.
    """
    _, count, channels = partials.shape
    out = partials.new_empty(count - 1, channels, dtype=dtype)
    last = partials.new_empty(channels, dtype=last_dtype)
    _launch(partials, out, last, 64)
    return out, last


def _launch(partials: Tensor, out: Tensor, last: Tensor | None, rows: int) -> None:
    split = out.numel()
    channels = split + (0 if last is None else last.numel())
    columns = _ELEMENTS // rows
    launch(
        sum_rows,
        (-(-channels // columns),),
        *(partials, out, last, partials.shape[0], channels, split),
        num_warps=4,
        num_stages=1,
        BLOCK=rows,
        BLOCK_C=columns,
    )


@triton.jit(do_not_specialize=["count", "split"])
def sum_rows(
    partials, out, last, count, channels, split, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Write the sums of BLOCK_C columns.

    Args:
        partials: float32 (P, C).
        out: (``split``,), written: the sums of the first columns.
        last: (C - ``split``,), written: the sums of the others; None if there are none.
        count: P.
        channels: C.
        split: See ``out``.
        BLOCK: Rows of a step.
        BLOCK_C: Columns of a program.
    """
    c = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    index = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    for first in range(0, count, BLOCK):
        row = first + index
        at = row.to(tl.int64)[:, None] * channels + c[None, :]
        mask = (row < count)[:, None] & (c < channels)[None, :]
        total += tl.load(partials + at, mask=mask, other=0.0)
    found = tl.sum(total, 0)
    tl.store(out + c, found.to(out.dtype.element_ty), mask=c < split)
    if last is not None:
        of_last = (c >= split) & (c < channels)
        tl.store(last + (c - split), found.to(last.dtype.element_ty), mask=of_last)
