"""The distance of a token and a frame from the diagonal, for `guided_attention`."""

from __future__ import annotations

import triton
import triton.language as tl

# Below this, 1 - exp(-x) loses digits that five terms of its series keep.
_SMALL = tl.constexpr(0.2)


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
