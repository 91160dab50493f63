"""What the kernels of `depthwise_conv` share: how a program divides a tile, and reads its rows."""

from __future__ import annotations

# ruff: noqa: RUF005 (Triton cannot unpack a tuple into another)
# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl


@triton.jit
def span(length, start, BLOCK: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr):
    """Divide the rows of a tile among GROUPS of threads, evenly however few they are.

    Returns:
        The rows of the tile; those of each group, a multiple of STEP; the first of each group in
        the tile, (GROUPS, 1). Only the last tile of a sequence is not full, so the rows that a
        group has too many lie past the end of the sequence.
    """
    size = tl.minimum(tl.maximum(length - start, 0), BLOCK)
    each = tl.cdiv(size, GROUPS * STEP) * STEP
    return size, each, tl.arange(0, GROUPS)[:, None] * each


@triton.jit
def load_taps(taps, c, inside, group, channels, TAPS: tl.constexpr):
    """The filters of channels c, float32, one tensor for each tap.

    They are read in the shape of the rows, each value by several threads, so that they need not
    change hands: every thread multiplies its own channels.
    """
    found = ()
    for k in tl.static_range(TAPS):
        found = found + (tl.load(taps + (k * channels + c + group * 0), mask=inside, other=0.0),)
    return found


@triton.jit
def gate(x, mask, channels, GATED: tl.constexpr):
    """The inputs at these addresses in float32; the gated ones have their gates C further."""
    a = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        a *= tl.sigmoid(tl.load(x + channels, mask=mask, other=0.0).to(tl.float32))
    return a
