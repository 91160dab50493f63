"""Kernels of `gated_activation`."""

from __future__ import annotations

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY_AT_0 = tl.constexpr(0.3989422804014327)
_CUBIC = tl.constexpr(0.044715)
_TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def _tile(rows, width, ROWS: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return the rows of this program's tile, int64, its columns, and which of them exist."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
    return row, c, (row < rows) & (c < width)


@triton.jit
def _share(g, ACTIVATION: tl.constexpr):
    """Return f(g) / g: 0.5 (1 + tanh(z / 2)) is the logistic function of z."""
    if ACTIVATION == "silu":
        share = tl.sigmoid(g)
    elif ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(g * _SQRT_HALF))
    else:
        share = tl.sigmoid(g * (1.0 + g * g * _CUBIC) * _TWICE_SQRT_2_OVER_PI)
    return share


@triton.jit
def _slope(g, share, ACTIVATION: tl.constexpr):
    """Return the derivative of g * share."""
    if ACTIVATION == "silu":
        slope = share * (1.0 + g * (1.0 - share))
    elif ACTIVATION == "gelu":
        slope = share + g * tl.exp(-0.5 * g * g) * _DENSITY_AT_0
    else:
        inner = (1.0 + g * g * (3.0 * _CUBIC)) * _TWICE_SQRT_2_OVER_PI
        slope = share * (1.0 + g * (1.0 - share) * inner)
    return slope


@triton.jit(do_not_specialize=["rows"])
def activate_gated(
    gate,
    up,
    y,
    rows,
    width,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Compute a tile of y; program (block of rows, block of columns).

    Args:
        gate: (rows, W).
        up: (rows, W).
        y: (rows, W), contiguous, written.
        rows: Rows of all tensors.
        width: W.
        gate_stride: Row stride of ``gate`` in elements.
        up_stride: Row stride of ``up`` in elements.
        ACTIVATION: ``silu``, ``gelu`` or ``gelu_tanh``.
        ROWS: Rows of a tile.
        BLOCK_W: Columns of a tile.
    """
    row, c, mask = _tile(rows, width, ROWS, BLOCK_W)
    g = tl.load(gate + row * gate_stride + c, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + c, mask=mask, other=0.0).to(tl.float32)
    value = g * _share(g, ACTIVATION) * u
    tl.store(y + row * width + c, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def activate_gated_backward(
    dy,
    gate,
    up,
    dgate,
    dup,
    rows,
    width,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write a tile of both gradients; program (block of rows, block of columns).

    Args:
        dy: (rows, W), contiguous.
        gate: (rows, W).
        up: (rows, W).
        dgate: (rows, W), contiguous, written.
        dup: (rows, W), contiguous, written.
        rows: Rows of all tensors.
        width: W.
        gate_stride: Row stride of ``gate`` in elements.
        up_stride: Row stride of ``up`` in elements.
        ACTIVATION: ``silu``, ``gelu`` or ``gelu_tanh``.
        ROWS: Rows of a tile.
        BLOCK_W: Columns of a tile.
    """
    row, c, mask = _tile(rows, width, ROWS, BLOCK_W)
    at = row * width + c
    gradient = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + c, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + c, mask=mask, other=0.0).to(tl.float32)
    share = _share(g, ACTIVATION)
    tl.store(dup + at, (gradient * g * share).to(dup.dtype.element_ty), mask=mask)
    dg = gradient * u * _slope(g, share, ACTIVATION)
    tl.store(dgate + at, dg.to(dgate.dtype.element_ty), mask=mask)
