"""`projected_top_k` in Triton.

Up to about 200 rows the time is that of reading the weight once, V C b bytes with element size b;
for more rows the products take longer. For the 5,248 classes and 1,024 channels of canary_1b_flash
in bfloat16 the weight is 10.7 MB, which takes 2.3 us at the 4.8 TB/s of an H200. Storing and
loading float32 logits would move only 0.7 MB for 32 rows; for few rows the number of launches, two,
matters more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.projected_top_k._kernels import merge_parts, rank_parts
from effasr_kernels.projected_top_k.definition import TopKArguments
from effasr_kernels.runtime.launch import launch, multiprocessors, refusal

_BLOCK = 1024
_PROGRAMS = 2
"""Programs per multiprocessor; one loads while the other selects."""


@dataclass(frozen=True, slots=True)
class Config:
    """Rows, classes and channels of a tile, number of warps and of pipeline stages."""

    block_r: int
    block_v: int
    block_c: int
    warps: int
    stages: int


def config(dtype: torch.dtype, rows: int) -> Config:
    """Return the configuration for a dtype and for few or many rows.

    Loads of the weight limit the speed. Its tiles are small, so that all multiprocessors load, with
    deep prefetching.
    """
    block_r = 16 if rows <= 16 else 64
    if dtype == torch.float32:
        # Without tensor cores, whose TF32 has 11 bits of precision.
        return Config(block_r, 32, 32, 4, 2)
    return Config(block_r, 32, 128, 4, 4)


def divide(rows: int, classes: int, choice: Config, processors: int) -> tuple[int, int]:
    """Return the number of vocabulary tiles per part and of parts.

    They depend only on the shapes and the GPU.

    Args:
        rows: N.
        classes: V'.
        choice: Tile sizes.
        processors: Number of multiprocessors of the GPU.
    """
    tiles = -(-classes // choice.block_v)
    wanted = max(1, _PROGRAMS * processors // max(1, -(-rows // choice.block_r)))
    per_split = -(-tiles // min(wanted, tiles))
    return per_split, -(-tiles // per_split)


def unsupported_reason(a: TopKArguments) -> str | None:
    """Return why this backend does not support these arguments, or None if it does."""
    return refusal(a.hidden)


def run(a: TopKArguments) -> tuple[Tensor, Tensor]:
    """See `effasr_kernels.projected_top_k.projected_top_k`."""
    hidden, k, classes, (rows, width) = a.hidden, a.k, a.classes, a.hidden.shape
    log_probs = hidden.new_empty(rows, k, dtype=torch.float32)
    indices = hidden.new_empty(rows, k, dtype=torch.int64)
    choice = config(hidden.dtype, rows)
    per_split, splits = divide(rows, classes, choice, multiprocessors(hidden.device))
    hidden, weight = (x if x.stride(1) == 1 else x.contiguous() for x in (hidden, a.weight))
    bias = None if a.bias is None else a.bias.contiguous()
    partial = hidden.new_empty(splits, rows, k, dtype=torch.int64)
    statistics = hidden.new_empty(2, splits, rows, dtype=torch.float32)
    block_k = 1 << (k - 1).bit_length()
    launch(
        rank_parts,
        (splits if rows else 0, -(-rows // choice.block_r)),
        *(hidden, weight, bias, partial, statistics, rows, classes),
        *(hidden.stride(0), weight.stride(0), per_split),
        num_warps=choice.warps,
        num_stages=choice.stages,
        K=k,
        BLOCK_K=block_k,
        WIDTH=width,
        BLOCK_R=choice.block_r,
        BLOCK_V=choice.block_v,
        BLOCK_C=choice.block_c,
    )
    launch(
        merge_parts,
        (rows,),
        *(partial, statistics, log_probs, indices, rows, splits),
        num_warps=4,
        num_stages=1,
        K=k,
        BLOCK_K=block_k,
        BLOCK=_BLOCK,
    )
    return log_probs, indices
