"""`projected_top_k` in Triton.

The time is that of reading the weight once, V C b bytes with b those of an element: 10.7 MB for the
5,248 classes and 1,024 channels of canary_1b_flash in bfloat16, 2.3 us at the 4.8 TB/s of an H200,
for up to some 200 rows, where the products begin to take longer. Logits would be written and read
again in float32, 0.7 MB for 32 rows; what counts for few rows is the number of launches, two.
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
"""On a multiprocessor at a time, so that one loads while the other chooses."""


@dataclass(frozen=True, slots=True)
class Config:
    """Rows, classes and channels of a tile, warps, stages of the loads."""

    block_r: int
    block_v: int
    block_c: int
    warps: int
    stages: int


def config(dtype: torch.dtype, rows: int) -> Config:
    """Choose for a dtype, and for few or many rows.

    All wait for the weight: its tiles are small, so that all multiprocessors load, far ahead.
    """
    block_r = 16 if rows <= 16 else 64
    if dtype == torch.float32:
        # Not on tensor cores, whose float32 has 11 bits.
        return Config(block_r, 32, 32, 4, 2)
    return Config(block_r, 32, 128, 4, 4)


def divide(rows: int, classes: int, choice: Config, processors: int) -> tuple[int, int]:
    """Tiles of the vocabulary in a part, and parts; by shapes and the GPU alone.

    Args:
        rows: N.
        classes: V'.
        choice: How tiles are cut.
        processors: Multiprocessors of the GPU.
    """
    tiles = -(-classes // choice.block_v)
    wanted = max(1, _PROGRAMS * processors // max(1, -(-rows // choice.block_r)))
    per_split = -(-tiles // min(wanted, tiles))
    return per_split, -(-tiles // per_split)


def unsupported_reason(a: TopKArguments) -> str | None:
    """Any shape is served."""
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
