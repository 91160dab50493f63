"""`grouped_linear` in Triton.

Tiles lie within a group, so that the grid is that of the same rows in one group and one tile more
per group. 8,192 bfloat16 rows of 1,024 channels to 4,096 are 69 GFLOP whatever the number of
groups: 69 us at the 989 TFLOP/s of an H200, and twice that in the backward. Weights of 4 groups and
rows are 118 MB, which take 25 us at 4.8 TB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from effasr_kernels.grouped_linear._kernels import multiply, multiply_transposed
from effasr_kernels.grouped_linear.definition import GroupedLinearArguments
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.launch import capability, launch, multiprocessors, refusal
from effasr_kernels.runtime.tiles import count_tiles


def unsupported_reason(a: GroupedLinearArguments) -> str | None:
    """Return why this backend does not support these arguments, or None if it does."""
    return refusal(a.x)


def forward(a: GroupedLinearArguments) -> tuple[tuple[Tensor], tuple[()]]:
    """See `effasr_kernels.grouped_linear.grouped_linear`; saves nothing."""
    bias = None if a.bias is None else a.bias.contiguous()
    return (_product(a.x, a.weight.contiguous(), bias, a.layout),), ()


def saved_like(a: GroupedLinearArguments) -> tuple[()]:
    """Return no tensors, because the backward only uses the arguments."""
    return ()


def backward(
    a: GroupedLinearArguments,
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    saved: Sequence[Tensor],
) -> dict[str, Tensor | None]:
    """Return the gradients of x, weight and bias; if ``frozen``, of x alone."""
    dx = _product(grads[0], a.weight.contiguous().transpose(1, 2), None, a.layout)
    if a.frozen:
        return {"x": dx}
    x, (groups, outputs, inputs) = _with_unit_stride(a.x), a.weight.shape
    dweight = a.weight.new_empty(groups, outputs, inputs)
    dbias = None if a.bias is None else a.bias.new_empty(groups, outputs)
    tile, options = _transposed_tile(x, groups, outputs, inputs)
    launch(
        multiply_transposed,
        (_cover(inputs, tile["BLOCK_C"]), _cover(outputs, tile["BLOCK_F"]), groups),
        *(grads[0], x, a.layout.cu_seqlens, dweight, dbias),
        *(groups, outputs, inputs, x.stride(0)),
        **tile,
        **options,
    )
    return {"x": dx, "weight": dweight, "bias": dbias}


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, layout: PackedLayout) -> Tensor:
    """Return the rows of ``x`` times their group's weight (G, outputs, inputs), transposed."""
    x, (_, outputs, inputs) = _with_unit_stride(x), weight.shape
    y = x.new_empty(layout.rows, outputs)
    tile, options = _tile(x, outputs, inputs)
    launch(
        multiply,
        (
            count_tiles(layout.rows, layout.num_sequences, tile["BLOCK_R"]),
            _cover(outputs, tile["BLOCK_N"]),
        ),
        *(x, weight, bias, layout.cu_seqlens, y, layout.num_sequences, layout.rows),
        *(outputs, inputs, x.stride(0), *weight.stride()),
        **tile,
        **options,
    )
    return y


def _is_narrow(x: Tensor, outputs: int, inputs: int) -> bool:
    """Return whether registers limit a tile to 64 x 64.

    They do in float32, without tensor cores, which would round it to TF32; and where rows are not
    aligned, so that each element is a load with an address of its own.
    """
    return x.dtype == torch.float32 or outputs % 16 != 0 or inputs % 16 != 0


def _tile(x: Tensor, outputs: int, inputs: int) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the sizes of a tile and launch options of a product of rows with weights."""
    if _is_narrow(x, outputs, inputs):
        return _sizes(64, 64, 32), {"num_warps": 4, "num_stages": 2}
    # With these two programs share a multiprocessor from sm_90 on.
    step, stages = (64, 3) if capability(x.device)[0] == 9 else (32, 4)
    return _sizes(128, 128, step), {"num_warps": 8, "num_stages": stages}


def _sizes(rows: int, outputs: int, step: int) -> dict[str, int]:
    return {"BLOCK_R": rows, "BLOCK_N": outputs, "BLOCK_K": step}


def _transposed_tile(
    x: Tensor, groups: int, outputs: int, inputs: int
) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the sizes of a tile and launch options of the gradient of weights.

    A tile takes all rows of its group: smaller ones, where larger ones would leave multiprocessors
    idle.
    """
    small, options = {"BLOCK_F": 64, "BLOCK_C": 64}, {"num_warps": 4, "num_stages": 2}
    if _is_narrow(x, outputs, inputs):
        return {**small, "BLOCK_T": 32}, options
    step, stages = (64, 3) if capability(x.device)[0] == 9 else (32, 4)
    if groups * _cover(outputs, 128) * _cover(inputs, 128) < multiprocessors(x.device):
        return {**small, "BLOCK_T": step}, {**options, "num_stages": stages}
    large = {"BLOCK_F": 128, "BLOCK_C": 128, "BLOCK_T": step}
    return large, {"num_warps": 8, "num_stages": stages}


def _cover(count: int, block: int) -> int:
    return -(-count // block)


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
