"""Device functions of both kernels of `depthwise_conv`: division of a tile and loads of rows."""

from __future__ import annotations

# ruff: noqa: RUF005 (Triton cannot unpack a tuple into another)
# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl


@triton.jit
def span(length, start, BLOCK: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr):
    """Divide the rows of a tile evenly among GROUPS of threads.

    Returns:
        The number of rows of the tile; the number of rows of each group, a multiple of STEP; and
        the offset of each group's first row in the tile, (GROUPS, 1). Only the last tile of a
        sequence can be incomplete, so surplus rows of a group are past the end of the sequence.
    """
    size = tl.minimum(tl.maximum(length - start, 0), BLOCK)
    each = tl.cdiv(size, GROUPS * STEP) * STEP
    return size, each, tl.arange(0, GROUPS)[:, None] * each


@triton.jit
def load_taps(weight, c, inside, group, TAPS: tl.constexpr):
    """Load the taps of channels c from (C, TAPS), in float32, as one tensor for each tap.

    The tensors have the shape of the rows, so several threads load the same value. No exchange
    between threads is needed then: every thread multiplies its own channels.
    """
    found = ()
    for k in tl.static_range(TAPS):
        tap = tl.load(weight + (c * TAPS + k + group * 0), mask=inside, other=0.0)
        found = found + (tap.to(tl.float32),)
    return found


@triton.jit
def gate(x, mask, channels, GATED: tl.constexpr):
    """Load inputs in float32 and, if GATED, multiply by the sigmoid of the input C channels on."""
    a = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        a *= tl.sigmoid(tl.load(x + channels, mask=mask, other=0.0).to(tl.float32))
    return a
