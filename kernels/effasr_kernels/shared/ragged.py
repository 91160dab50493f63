"""Helpers of the references, which process one sequence at a time in a wide dtype."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels.packed import PackedLayout


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype for sums over ``x``: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """Cast ``x`` to `wide_dtype`."""
    return x.to(wide_dtype(x))


def split_rows(x: Tensor, layout: PackedLayout) -> tuple[Tensor, ...]:
    """One view per sequence, without the tail, so the tail's gradient is zero."""
    # All empty sequences (a static shape has hundreds) share one view.
    lengths = layout.lengths
    pieces = iter(x.split([*filter(None, lengths), layout.rows - layout.total]))
    empty = x[:0]
    return tuple(next(pieces) if length else empty for length in lengths)


def join_rows(pieces: Sequence[Tensor], layout: PackedLayout, like: Tensor) -> Tensor:
    """The inverse of `split_rows`, with zeros in the tail and the dtype and device of ``like``."""
    # The pieces have the dtype of `wide_dtype`; pieces of empty sequences may be left out. Without
    # pieces the result has the shape of ``like`` and depends on it with zero gradient.
    if not pieces:
        return zeroed(like)
    width = pieces[0].shape[1:]
    tail = like.new_zeros(layout.rows - layout.total, *width, dtype=wide_dtype(like))
    return torch.cat([*pieces, tail]).to(like.dtype)


def split_attention(
    q: Tensor, k: Tensor, v: Tensor, layout_q: PackedLayout, layout_k: PackedLayout
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield q (H, T_q, D), k and v (H, T_k, D) of each sequence that has queries."""
    parts = split_rows(q, layout_q), split_rows(k, layout_k), split_rows(v, layout_k)
    for q_n, k_n, v_n in zip(*parts, strict=True):
        if q_n.shape[0]:
            yield q_n.transpose(0, 1), k_n.transpose(0, 1), v_n.transpose(0, 1)


def real_rows(x: Tensor, layout: PackedLayout) -> Tensor:
    # Slice only if needed, because the gradient of a slice is a copy.
    return x if layout.total == layout.rows else x[: layout.total]


def with_tail(x: Tensor, layout: PackedLayout) -> Tensor:
    """The inverse of `real_rows`, with zeros in the tail."""
    return x if len(x) == layout.rows else F.pad(x, (0, 0, 0, layout.rows - len(x)))


def zeroed(x: Tensor) -> Tensor:
    """Zeros with a zero gradient to ``x``, also where ``x`` is NaN, which ``0 * x`` would keep."""
    return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)
