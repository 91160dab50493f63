"""The relative part of Transformer-XL's scores as a buffer, and its gradients.

The scores of a query by distance are a product with the table of positions; those by key are the
same numbers, each row moved by one place more than the row above (the "relative shift"). Here that
skew is in the addresses alone: the product of a tile of queries with a stretch of the table is
stored where its keys are, so that attention reads plain tiles of a bias, and its backward hands
back plain tiles of that bias's gradient.

The buffer has a row of `bias_width` for each query and head, T_q H W elements: half of the product
by distance, and none for the padding between sequences. Its rows are full vectors of 16 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from effasr_kernels.attention.position import RelativeBias
from effasr_kernels.attention.triton import relative_grads as backward
from effasr_kernels.attention.triton import relative_scores as forward
from effasr_kernels.attention.triton.config import padded_width
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.launch import launch
from effasr_kernels.runtime.tiles import count_tiles

_STEP = forward.STEP.value
_PROGRAMS = 1024
"""Programs for the gradient of the table at most, unless it is long: eight for each SM, or so."""


def bias_width(bound: int) -> int:
    """W, the columns of the buffer for sequences of up to ``bound`` keys: a multiple of 8."""
    return max(8, -(-bound // 8) * 8)


def relative_scores(
    q: Tensor,
    position_bias: Tensor,
    table: Tensor,
    layout_q: PackedLayout,
    layout_k: PackedLayout,
) -> Tensor:
    r"""The part of the scores that depends on distance, before they are scaled.

    .. math::
        B_{ihj} = (q_{ih} + v_h)^\top r_{i-j,h}

    for query i and key j of one sequence.

    Args:
        q: (T_q, H, D).
        position_bias: v, (H, D).
        table: r, (2 L - 1, H, D), as `effasr_kernels.attention.RelativeBias` has it; L is at least
            every length of both layouts.
        layout_q: The sequences of ``q``.
        layout_k: Those of the keys.

    Returns:
        (T_q, H, W), the dtype of ``q``, with W the `bias_width` of ``layout_k.max_seqlen_bound``.
        What a row holds past the keys of its sequence is finite up to a whole vector of 8 columns;
        the rest, and the whole tail, is undefined.
    """
    q, table = _dense_rows(q), _dense_rows(table)
    heads, width = q.shape[1:]
    out = q.new_empty(layout_q.rows, heads, bias_width(layout_k.max_seqlen_bound))
    block_m, block_w, warps, stages = _blocks_of_scores(q.dtype, padded_width(width))
    launch(
        forward.scores,
        (_tiles(layout_q, block_m), heads),
        *(out, q, position_bias.contiguous(), table, *_sizes(layout_q, layout_k, table, out)),
        *(heads, *q.stride()[:2], *table.stride()[:2]),
        **_options(width, block_m, block_w, warps, stages),
    )
    return out


def relative_backward(
    ds: Tensor,
    q: Tensor,
    k: Tensor,
    position: RelativeBias,
    layout_q: PackedLayout,
    layout_k: PackedLayout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""The gradients of all scores of `RelativeBias`, but for that of the keys.

    Args:
        ds: (T_q, H, W), contiguous, the dtype of ``q``: with respect to the scores. Zero from the
            last key of a row to a whole vector of 8 columns; the rest is ignored, as is the tail.
        q: (T_q, H, D).
        k: (T_k, H, D).
        position: What the scores are made of.
        layout_q: The sequences of ``q``.
        layout_k: Those of ``k``.
        scale: Factor of the scores.

    Returns:
        With respect to ``q``, (T_q, H, D), zero in the tail; to the biases by content and by
        position, (H, D) each; to the table, (2 L - 1, H, D). Contiguous, in the dtype of ``q``.
    """
    q, k, table = _dense_rows(q), _dense_rows(k), _dense_rows(position.table)
    heads, width = q.shape[1:]
    block_m, block_n, block_w, warps = _blocks_of_grad_queries(q.dtype, padded_width(width))
    tiles = _tiles(layout_q, block_m)
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_biases = q.new_empty(2, tiles, heads, width, dtype=torch.float32)
    launch(
        backward.grad_queries,
        (tiles, heads),
        *(grad_q, grad_biases, ds, k, table, *_sizes(layout_q, layout_k, table, ds)),
        *(scale, heads, *k.stride()[:2], *table.stride()[:2]),
        **_options(width, block_m, block_w, warps, 1),
        BLOCK_N=block_n,
    )
    by_content, by_position = grad_biases.sum(1).to(q.dtype)
    grad_table = _grad_table(ds, q, position.position_bias, table, layout_q, layout_k, scale)
    return grad_q, by_content, by_position, grad_table


def _grad_table(
    ds: Tensor,
    q: Tensor,
    position_bias: Tensor,
    table: Tensor,
    layout_q: PackedLayout,
    layout_k: PackedLayout,
    scale: float,
) -> Tensor:
    heads, width = q.shape[1:]
    block_m, block_w, warps, stages = _blocks_of_grad_table(q.dtype, padded_width(width))
    reach = (table.shape[0] + 1) // 2
    # Blocks begin up to a step lower than multiples of their width.
    blocks = 2 * -(-(reach + _STEP - 2) // block_w)
    tiles = _tiles(layout_q, block_m) // _STEP
    # One share for each of the rests of a query's place by the step, and more while there is room.
    splits = _STEP * max(1, min(_PROGRAMS // (_STEP * blocks * heads), tiles))
    by_split = q.new_empty(splits, *table.shape, dtype=torch.float32)
    launch(
        backward.grad_table,
        (splits * heads, blocks),
        *(by_split, ds, q, position_bias.contiguous(), *_sizes(layout_q, layout_k, table, ds)),
        *(splits, scale, heads, *q.stride()[:2]),
        **_options(width, block_m, block_w, warps, stages),
    )
    return by_split.sum(0).to(table.dtype)


def _sizes(
    layout_q: PackedLayout, layout_k: PackedLayout, table: Tensor, scores: Tensor
) -> tuple[Any, ...]:
    """What all kernels need to know of the layouts and of the buffer."""
    offsets = layout_q.cu_seqlens, layout_k.cu_seqlens
    reach = (table.shape[0] + 1) // 2
    return *offsets, layout_q.num_sequences, layout_q.rows, reach, scores.shape[-1] // 8


def _options(width: int, block_m: int, block_w: int, warps: int, stages: int) -> dict[str, int]:
    return {
        "num_warps": warps,
        "num_stages": stages,
        "WIDTH": width,
        "BLOCK_D": padded_width(width),
        "BLOCK_M": block_m,
        "BLOCK_W": block_w,
    }


def _tiles(layout: PackedLayout, block_m: int) -> int:
    """Tiles of every second query: those of adjacent ones, twice."""
    return _STEP * count_tiles(layout.rows, layout.num_sequences, _STEP * block_m)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _blocks_of_scores(dtype: torch.dtype, block_d: int) -> tuple[int, int, int, int]:
    """Queries of a tile, distances of a step, warps, stages: no registers spill."""
    if dtype == torch.float32:
        return 32, 32, 4, 1
    return 64, 64, 4 if block_d <= 128 else 8, 2


def _blocks_of_grad_queries(dtype: torch.dtype, block_d: int) -> tuple[int, int, int, int]:
    """Queries of a tile, keys of a step, distances of a step, warps.

    In one stage: the copies of a pipeline are of pairs, twice the instructions, and meet in banks.
    """
    if dtype == torch.float32:
        return 32 if block_d <= 128 else 16, 16, 32, 8
    return 64 if block_d <= 128 else 32, 64, 32, 4 if block_d <= 64 else 8


def _blocks_of_grad_table(dtype: torch.dtype, block_d: int) -> tuple[int, int, int, int]:
    """Queries of a step, distances of a block, warps, stages.

    Most sequences have few steps of such a block: steps are short, so that less of them is empty,
    and not pipelined. Few warps repeat less of what is the same for all.
    """
    if dtype == torch.float32:
        return 32 if block_d <= 128 else 16, 32, 8, 1
    return 16, 64, 2 if block_d <= 64 else 4 if block_d <= 128 else 8, 1
