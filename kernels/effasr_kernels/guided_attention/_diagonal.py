"""Masks of tiles and the distance from the diagonal, for forward and backward."""

from __future__ import annotations

import triton
import triton.language as tl

COUNTS = (
    *("sequences", "rows_q", "rows_k", "heads"),
    *("q_row", "q_head", "k_row", "k_head", "v_row", "v_head"),
)
"""Integer arguments on whose values kernels are not specialized."""

# Below this, 1 - exp(-x) loses digits that five terms of its series keep.
_SMALL = tl.constexpr(0.2)


@triton.jit
def in_tile(inside, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """The mask of a tile of rows and a padded width, broadcastable to (BLOCK, BLOCK_D).

    Args:
        inside: bool (BLOCK,), whether a row is within its sequence.
        WIDTH: D.
        BLOCK_D: The padded width; if it equals D, only rows are masked.
    """
    mask = inside[:, None]
    if WIDTH < BLOCK_D:
        mask = mask & (tl.arange(0, BLOCK_D) < WIDTH)[None, :]
    return mask


@triton.jit
def distance(token, frame, narrowness):
    """The distance from the diagonal: ``1 - exp(-narrowness (token - frame)^2)``.

    Args:
        token: Relative positions of tokens in [0, 1), float32, broadcastable with ``frame``.
        frame: Relative positions of frames in [0, 1), float32.
        narrowness: ``1 / (2 sigma^2)``.
    """
    apart = token - frame
    x = apart * apart * narrowness
    series = x * (1 + x * (-1 / 2 + x * (1 / 6 + x * (-1 / 24 + x * (1 / 120)))))
    return tl.where(x < _SMALL, series, 1 - tl.exp(-x))
