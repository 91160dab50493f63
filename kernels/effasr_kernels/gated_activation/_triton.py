"""`gated_activation` in Triton.

For each bfloat16 element the forward moves 6 bytes and the backward 10: 53 and 88 us for 6,842 rows
of 6,144 channels at the 4.8 TB/s of an H200. Separate calls of PyTorch move 10 and 18.
"""

# pyright: reportGeneralTypeIssues=false
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.gated_activation import GatedArguments
from effasr_kernels.runtime.dispatch import Gradients, Tensors
from effasr_kernels.runtime.launch import ceil_div, launch

_ROWS = 4
_MOST_COLUMNS = 512


def forward(a: GatedArguments) -> tuple[tuple[Tensor], tuple[()]]:
    y = a.gate.new_empty(a.gate.shape)
    _launch(activate_gated, a, y)
    return (y,), ()


def backward(a: GatedArguments, grads: Tensors, results: Tensors, saved: Tensors) -> Gradients:
    dgate, dup = a.gate.new_empty(a.gate.shape), a.gate.new_empty(a.gate.shape)
    _launch(activate_gated_backward, a, dgate, dup, dy=grads[0])
    return {"gate": dgate, "up": dup}


def _launch(kernel: Any, a: GatedArguments, *written: Tensor, dy: Tensor | None = None) -> None:
    """Launch a kernel on tiles; a thread loads 16 bytes of each row of a tile."""
    gate, up = (x if x.stride(1) == 1 else x.contiguous() for x in (a.gate, a.up))
    rows, width = gate.shape
    row_of_warp = 32 * 16 // gate.element_size()
    block = min(_MOST_COLUMNS, max(row_of_warp, 1 << (width - 1).bit_length()))
    launch(
        kernel,
        (ceil_div(rows, _ROWS), ceil_div(width, block)),
        *(() if dy is None else (dy,)),
        *(gate, up, *written, rows, width, gate.stride(0), up.stride(0)),
        ACTIVATION=a.activation,
        ROWS=_ROWS,
        BLOCK_W=block,
        num_warps=block // row_of_warp,
    )


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
def _logit_of_tanh(g):
    """Return the z of which `gelu_tanh` takes the logistic function."""
    return g * (1.0 + g * g * _CUBIC) * _TWICE_SQRT_2_OVER_PI


@triton.jit
def _share(g, ACTIVATION: tl.constexpr):
    """Return f(g) / g: 0.5 (1 + tanh(z / 2)) is the logistic function of z."""
    if ACTIVATION == "silu":
        share = tl.sigmoid(g)
    elif ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(g * _SQRT_HALF))
    else:
        share = tl.sigmoid(_logit_of_tanh(g))
    return share


@triton.jit
def _slope(g, share, ACTIVATION: tl.constexpr):
    """Return the derivative of g * share."""
    if ACTIVATION == "silu":
        slope = share * (1.0 + g * (1.0 - share))
    elif ACTIVATION == "gelu":
        slope = share + g * tl.exp(-0.5 * g * g) * _DENSITY_AT_0
    else:
        # 1 - share alone would lose the digits of a share near 1, and g dz multiplies what is left.
        z = _logit_of_tanh(g)
        complement = tl.where(z > 0.0, share * tl.exp(-z), 1.0 - share)
        dz = (1.0 + g * g * (3.0 * _CUBIC)) * _TWICE_SQRT_2_OVER_PI
        slope = share * (1.0 + g * complement * dz)
    return slope


@triton.jit(do_not_specialize=["rows"])
def activate_gated(
    gate,  # (rows, W)
    up,  # (rows, W)
    y,  # (rows, W), contiguous, written
    rows,  # rows of all tensors
    width,  # W
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,  # ``silu``, `gelu` or `gelu_tanh`
    ROWS: tl.constexpr,  # rows of a tile
    BLOCK_W: tl.constexpr,
):
    """Compute a tile of y; program (block of rows, block of columns)."""
    row, c, mask = _tile(rows, width, ROWS, BLOCK_W)
    g = tl.load(gate + row * gate_stride + c, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + c, mask=mask, other=0.0).to(tl.float32)
    value = g * _share(g, ACTIVATION) * u
    tl.store(y + row * width + c, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def activate_gated_backward(
    dy,  # (rows, W), contiguous
    gate,  # (rows, W)
    up,  # (rows, W)
    dgate,  # (rows, W), contiguous, written
    dup,  # (rows, W), contiguous, written
    rows,  # rows of all tensors
    width,  # W
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,  # ``silu``, `gelu` or `gelu_tanh`
    ROWS: tl.constexpr,  # rows of a tile
    BLOCK_W: tl.constexpr,
):
    """Write a tile of both gradients; program (block of rows, block of columns)."""
    row, c, mask = _tile(rows, width, ROWS, BLOCK_W)
    at = row * width + c
    gradient = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + c, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + c, mask=mask, other=0.0).to(tl.float32)
    share = _share(g, ACTIVATION)
    tl.store(dup + at, (gradient * g * share).to(dup.dtype.element_ty), mask=mask)
    dg = gradient * u * _slope(g, share, ACTIVATION)
    tl.store(dgate + at, dg.to(dgate.dtype.element_ty), mask=mask)
