"""Kernels of `grouped_linear`."""

from __future__ import annotations

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from effasr_kernels.runtime.tiles import find_sequence, find_tile


@triton.jit(do_not_specialize=["groups", "rows"])
def multiply(
    x,
    weight,
    bias,
    cu_seqlens,
    y,
    groups,
    rows,
    outputs,
    inputs,
    x_stride,
    group_stride,
    output_stride,
    input_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write a tile of ``x`` times the weight of its group; program (tile of rows, of outputs).

    The forward gives the strides of W, and the gradient of x those of its transpose.

    Args:
        x: (rows, inputs).
        weight: (groups, outputs, inputs), of any strides of which one is 1.
        bias: (groups, outputs), contiguous; or None.
        cu_seqlens: int32 (groups + 1,).
        y: (rows, outputs), contiguous, written.
        groups: Number of groups.
        rows: Rows of x and y, including the tail.
        outputs: Columns of y.
        inputs: Columns of x.
        x_stride: Row stride of ``x`` in elements.
        group_stride: Stride of ``weight`` between groups.
        output_stride: Stride of ``weight`` between outputs.
        input_stride: Stride of ``weight`` between inputs.
        BLOCK_R: Rows of a tile.
        BLOCK_N: Outputs of a tile.
        BLOCK_K: Inputs of a step.
    """
    group, begin, length, start = find_tile(cu_seqlens, groups, rows, tl.program_id(0), BLOCK_R)
    if start >= length:
        return
    row = start + tl.arange(0, BLOCK_R)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    # The tail holds no group: its rows stay zero, whatever x holds there.
    if group < groups:
        # Rows past the end of the group load its last one, and are not stored.
        inside = begin + tl.minimum(row, length - 1)
        x_tile = x + inside[:, None] * x_stride + k[None, :]
        w_tile = weight + group.to(tl.int64) * group_stride
        w_tile += k[:, None] * input_stride + n[None, :].to(tl.int64) * output_stride
        known = (n < outputs)[None, :]
        for first in range(0, inputs, BLOCK_K):
            left = inputs - first
            a = tl.load(x_tile, mask=(k < left)[None, :], other=0.0)
            b = tl.load(w_tile, mask=(k < left)[:, None] & known, other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
            x_tile += BLOCK_K
            w_tile += BLOCK_K * input_stride
        if bias is not None:
            b_row = bias + group.to(tl.int64) * outputs + n
            total += tl.load(b_row, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    at = (begin + row)[:, None] * outputs + n[None, :]
    mask = (row < length)[:, None] & (n < outputs)[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["groups"])
def multiply_transposed(
    dy,
    x,
    cu_seqlens,
    dweight,
    dbias,
    groups,
    outputs,
    inputs,
    x_stride,
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Write a tile of the gradient of a group's weight; program (inputs, outputs, group).

    It adds the products of the group's rows in their order. Programs of the first tile of inputs
    also write the gradient of the bias.

    Args:
        dy: (rows, outputs), contiguous.
        x: (rows, inputs).
        cu_seqlens: int32 (groups + 1,).
        dweight: (groups, outputs, inputs), contiguous, written.
        dbias: (groups, outputs), contiguous, written; or None.
        groups: Number of groups.
        outputs: Columns of dy.
        inputs: Columns of x.
        x_stride: Row stride of ``x`` in elements.
        BLOCK_F: Outputs of a tile.
        BLOCK_C: Inputs of a tile.
        BLOCK_T: Rows of a step.
    """
    group = tl.program_id(2)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    t = tl.arange(0, BLOCK_T)
    begin, length = find_sequence(cu_seqlens, groups, group)
    dy_tile = dy + (begin + t)[:, None] * outputs + f[None, :]
    x_tile = x + (begin + t)[:, None] * x_stride + c[None, :]
    total = tl.zeros((BLOCK_F, BLOCK_C), tl.float32)
    sums = tl.zeros((BLOCK_F,), tl.float32)
    for first in range(0, length, BLOCK_T):
        row = (t < length - first)[:, None]
        # Masked on both sides: the rows after a group may hold NaN, and 0 * NaN is NaN.
        a = tl.load(dy_tile, mask=row & (f < outputs)[None, :], other=0.0)
        b = tl.load(x_tile, mask=row & (c < inputs)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
        if dbias is not None:  # noqa: SIM102 (decided while compiling, the other one on the GPU)
            if tl.program_id(0) == 0:
                sums += tl.sum(a.to(tl.float32), 0)
        dy_tile += tl.cast(BLOCK_T, tl.int64) * outputs
        x_tile += tl.cast(BLOCK_T, tl.int64) * x_stride
    at = (group.to(tl.int64) * outputs + f.to(tl.int64))[:, None] * inputs + c[None, :]
    mask = (f < outputs)[:, None] & (c < inputs)[None, :]
    tl.store(dweight + at, total.to(dweight.dtype.element_ty), mask=mask)
    if dbias is not None:  # noqa: SIM102
        if tl.program_id(0) == 0:
            to = dbias + group.to(tl.int64) * outputs + f
            tl.store(to, sums.to(dbias.dtype.element_ty), mask=f < outputs)
