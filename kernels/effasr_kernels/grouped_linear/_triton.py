"""`grouped_linear` in Triton.

Tiles lie within a group, so that the grid has as many tiles as for one group, and one tile more
per group. 8,192 bfloat16 rows of 1,024 channels to 4,096 are 69 GFLOP whatever the number of
groups: 69 us at the 989 TFLOP/s of an H200, and twice that in the backward. Weights of 4 groups and
rows are 118 MB, which take 25 us at 4.8 TB/s.
"""

# pyright: reportGeneralTypeIssues=false
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.grouped_linear import GroupedLinearArguments
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Gradients, Tensors
from effasr_kernels.runtime.launch import capability, ceil_div, launch, multiprocessors, unit_stride
from effasr_kernels.runtime.tiles import find_sequence, find_tile, tile_programs


def forward(a: GroupedLinearArguments) -> tuple[tuple[Tensor], tuple[()]]:
    bias = None if a.bias is None else a.bias.contiguous()
    return (_product(a.x, a.weight.contiguous(), bias, a.layout),), ()


def backward(
    a: GroupedLinearArguments, grads: Tensors, results: Tensors, saved: Tensors
) -> Gradients:
    dx = _product(grads[0], a.weight.contiguous().transpose(1, 2), None, a.layout)
    if a.frozen:
        return {"x": dx}
    x, (groups, outputs, inputs) = unit_stride(a.x), a.weight.shape
    dweight = a.weight.new_empty(groups, outputs, inputs)
    dbias = None if a.bias is None else a.bias.new_empty(groups, outputs)
    tile, options = _transposed_tile(x, groups, outputs, inputs)
    launch(
        multiply_transposed,
        (ceil_div(inputs, tile["BLOCK_C"]), ceil_div(outputs, tile["BLOCK_F"]), groups),
        *(grads[0], x, a.layout.cu_seqlens, dweight, dbias),
        *(groups, outputs, inputs, x.stride(0)),
        **tile,
        **options,
    )
    return {"x": dx, "weight": dweight, "bias": dbias}


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, layout: PackedLayout) -> Tensor:
    """Return the rows of ``x`` times their group's weight (G, outputs, inputs), transposed."""
    x, (_, outputs, inputs) = unit_stride(x), weight.shape
    y = x.new_empty(layout.rows, outputs)
    tile, options = _tile(x, outputs, inputs)
    launch(
        multiply,
        (
            tile_programs(layout, tile["BLOCK_R"]),
            ceil_div(outputs, tile["BLOCK_N"]),
        ),
        *(x, weight, bias, layout.cu_seqlens, y, layout.num_sequences, layout.rows),
        *(outputs, inputs, x.stride(0), *weight.stride()),
        **tile,
        **options,
    )
    return y


def _is_narrow(x: Tensor, outputs: int, inputs: int) -> bool:
    """Return whether registers limit a tile to 64 x 64."""
    # They do in float32, without tensor cores, which would round it to TF32; and where rows are not
    # aligned, so that each element is a separate load.
    return x.dtype == torch.float32 or outputs % 16 != 0 or inputs % 16 != 0


def _tile(x: Tensor, outputs: int, inputs: int) -> tuple[dict[str, int], dict[str, Any]]:
    if _is_narrow(x, outputs, inputs):
        return {"BLOCK_R": 64, "BLOCK_N": 64, "BLOCK_K": 32}, {"num_warps": 4, "num_stages": 2}
    # With these two programs share a multiprocessor from sm_90 on.
    step, stages = (64, 3) if capability(x.device)[0] == 9 else (32, 4)
    return {"BLOCK_R": 128, "BLOCK_N": 128, "BLOCK_K": step}, {"num_warps": 8, "num_stages": stages}


def _transposed_tile(
    x: Tensor, groups: int, outputs: int, inputs: int
) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the sizes of a tile and launch options of the gradient of weights."""
    # A tile takes all rows of its group: smaller ones, where larger ones would leave
    # multiprocessors idle.
    small, options = {"BLOCK_F": 64, "BLOCK_C": 64}, {"num_warps": 4, "num_stages": 2}
    if _is_narrow(x, outputs, inputs):
        return {**small, "BLOCK_T": 32}, options
    step, stages = (64, 3) if capability(x.device)[0] == 9 else (32, 4)
    if groups * ceil_div(outputs, 128) * ceil_div(inputs, 128) < multiprocessors(x.device):
        return {**small, "BLOCK_T": step}, {**options, "num_stages": stages}
    large = {"BLOCK_F": 128, "BLOCK_C": 128, "BLOCK_T": step}
    return large, {"num_warps": 8, "num_stages": stages}


@triton.jit(do_not_specialize=["groups", "rows"])
def multiply(
    x,  # (rows, inputs)
    weight,  # (groups, outputs, inputs), of any strides with a 1 among them
    bias,  # (groups, outputs), contiguous; or None
    cu_seqlens,  # int32 (groups + 1,)
    y,  # (rows, outputs), contiguous, written
    groups,
    rows,  # rows of x and y, including the tail
    outputs,  # columns of y
    inputs,  # columns of x
    x_stride,
    group_stride,  # stride of `weight` between groups
    output_stride,  # stride of `weight` between outputs
    input_stride,  # stride of `weight` between inputs
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write a tile of ``x`` times the weight of its group; program (tile of rows, of outputs)."""
    # The forward gives the strides of W, and the gradient of x the strides of its transpose.
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
        in_outputs = (n < outputs)[None, :]
        for first in range(0, inputs, BLOCK_K):
            remaining = inputs - first
            a = tl.load(x_tile, mask=(k < remaining)[None, :], other=0.0)
            b = tl.load(w_tile, mask=(k < remaining)[:, None] & in_outputs, other=0.0)
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
    dy,  # (rows, outputs), contiguous
    x,  # (rows, inputs)
    cu_seqlens,  # int32 (groups + 1,)
    dweight,  # (groups, outputs, inputs), contiguous, written
    dbias,  # (groups, outputs), contiguous, written; or None
    groups,
    outputs,  # columns of dy
    inputs,  # columns of x
    x_stride,
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Write a tile of the gradient of a group's weight; program (inputs, outputs, group)."""
    # It adds the products of the group's rows in their order. Programs of the first tile of inputs
    # also write the gradient of the bias.
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
