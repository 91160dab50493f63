"""The relative part of Transformer-XL's scores as a bias buffer, and its gradients.

The scores of a query by distance are a product with the position table. The scores by key are the
same numbers with each row shifted by one more column than the row above (the "relative shift").
Here the shift is only in the addresses: the product of a tile of queries with a range of the table
is stored at the columns of its keys, so that the attention kernels read unshifted tiles of a bias,
and their backward writes unshifted tiles of its gradient.

The buffer has a row of `bias_width` for each query and head, T_q H W elements: half as many as the
product by distance, without padding between sequences. Its rows are multiples of 16 bytes.
"""

from typing import Any

import torch
from torch import Tensor

from effasr_kernels.attention.context import Context
from effasr_kernels.attention.position import RelativeBias
from effasr_kernels.attention.triton import relative_grads as backward
from effasr_kernels.attention.triton import relative_scores as forward
from effasr_kernels.attention.triton.config import padded_width
from effasr_kernels.attention.triton.delta import rows_of_block
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.counters import program_counters
from effasr_kernels.runtime.launch import capability, ceil_div, launch, unit_stride
from effasr_kernels.runtime.tiles import Programs, kept_tile_table, tile_programs
from effasr_kernels.shared.partial_sums import summed

_STEP = forward.STEP.value
_PROGRAMS, _PROGRAMS_NARROW = 1024, 2048
"""Target number of programs for the gradient of the table: about eight a multiprocessor, and twice
as many for heads of up to 64 channels, whose sums of splits are small."""


def bias_width(bound: int) -> int:
    """W, the columns of the buffer for sequences of up to ``bound`` keys: a multiple of 8."""
    return max(8, ceil_div(bound, 8) * 8)


def relative_scores(
    q: Tensor,  # (T_q, H, D)
    position_bias: Tensor,  # v, (H, D)
    table: Tensor,  # r, (2 L - 1, H, D), of `RelativeBias`; L is at least every length of both
    layout_q: PackedLayout,
    layout_k: PackedLayout,  # layout of the keys
    context: Context | None = None,  # the keys that a query sees; by default all of its sequence
    *,
    content_bias: Tensor | None = None,  # u, (H, D), to write the queries of the content part, too
    biased: Tensor | None = None,  # q + u, rounded, (T_q, H, D), written; its tail is not
    result: Tensor | None = None,  # of attention, (T_q, H, D), to compute its `row_delta`, too
    grad_result: Tensor | None = None,  # the gradient of `result`, likewise
    delta: Tensor | None = None,  # float32 (H, T_q), written; its tail is not
) -> Tensor:
    r"""Compute the part of the scores that depends on distance, before scaling.

    .. math::
        B_{ihj} = (q_{ih} + v_h)^\top r_{i-j,h}

    for query i and key j of one sequence.

    Returns (T_q, H, W), the dtype of ``q``, with W the `bias_width` of
    ``layout_k.max_seqlen_bound``. Before and past the keys that it sees a row is finite in the rest
    of a group of 8 columns; the other columns and the tail are undefined.
    """
    q, table = unit_stride(q), unit_stride(table)
    heads, width = q.shape[1:]
    out = q.new_empty(layout_q.rows, heads, bias_width(layout_k.max_seqlen_bound))
    block_m, block_w, warps, stages = _blocks_of_scores(q.dtype, padded_width(width))
    launch(
        forward.scores,
        (_tiles(layout_q, block_m), heads),
        *(out, q, position_bias.contiguous(), table),
        *(None if content_bias is None else content_bias.contiguous(), biased),
        *(result, grad_result, delta),
        *_sizes(layout_q, layout_k, table, out, block_m),
        *(heads, *q.stride()[:2], *table.stride()[:2]),
        *bounds(context, layout_k),
        **_options(width, block_m, block_w, warps, stages),
        PART=min(block_m, rows_of_block(width)),
    )
    return out


def relative_backward(
    # Gradient of the scores, (T_q, H, W), contiguous, the dtype of ``q``. Zero past the keys of a
    # row up to the next multiple of 8 columns, and of a context likewise; the other columns and the
    # tail are ignored.
    ds: Tensor,
    q: Tensor,  # (T_q, H, D)
    k: Tensor,  # (T_k, H, D)
    position: RelativeBias,  # biases and table of the scores
    layout_q: PackedLayout,
    layout_k: PackedLayout,
    scale: float,  # factor of the scores
    grad_q: Tensor | None = None,  # (T_q, H, D), written, rows contiguous; None: a new tensor
    context: Context | None = None,  # the keys that a query sees; by default all of its sequence
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of the scores of `RelativeBias`, except for the keys' gradient."""
    # Returns the gradients of ``q``, (T_q, H, D), zero in the tail; of the content and the position
    # bias, (H, D) each; and of the table, (2 L - 1, H, D). In the dtype of ``q``.
    q, k, table = unit_stride(q), unit_stride(k), unit_stride(position.table)
    heads, width = q.shape[1:]
    block_m, block_n, block_w, warps = _blocks_of_grad_queries(q.dtype, padded_width(width))
    tiles = _tiles(layout_q, block_m)
    if grad_q is None:
        grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_biases = q.new_empty(tiles, 2, heads, width, dtype=torch.float32)
    # With a context ptxas uses 168 for Ampere, for three programs on a multiprocessor, and 8 bytes
    # of stack. Where it must not use more, it does without the stack. On later GPUs it uses fewer.
    is_narrow = q.dtype != torch.float32 and padded_width(q.shape[-1]) <= 64
    launch(
        backward.grad_queries,
        (tiles, heads),
        *(grad_q, grad_biases, ds, k, table),
        *_sizes(layout_q, layout_k, table, ds, block_m),
        *(scale, heads, *k.stride()[:2], *table.stride()[:2], grad_q.stride(0)),
        *bounds(context, layout_k),
        **_options(width, block_m, block_w, warps, 1),
        maxnreg=168 if context is not None and is_narrow and capability(q.device)[0] == 8 else None,
        BLOCK_N=block_n,
    )
    by_content, by_position = summed(grad_biases, q.dtype)
    grad_table = _grad_table(
        ds, q, position.position_bias, table, layout_q, layout_k, scale, context
    )
    return grad_q, by_content, by_position, grad_table


def _grad_table(
    ds: Tensor,
    q: Tensor,
    position_bias: Tensor,
    table: Tensor,
    layout_q: PackedLayout,
    layout_k: PackedLayout,
    scale: float,
    context: Context | None,
) -> Tensor:
    heads, width = q.shape[1:]
    block_m, block_w, warps, stages, registers = _blocks_of_grad_table(q.dtype, width)
    reach = (table.shape[0] + 1) // 2
    # Blocks begin up to a step below multiples of their width.
    blocks = 2 * -(-(reach + _STEP - 2) // block_w)
    tiles = _tiles(layout_q, block_m) // _STEP
    # One split for each remainder of a query's position by the step, and more up to _PROGRAMS.
    programs = _PROGRAMS_NARROW if width <= 64 else _PROGRAMS
    splits = _STEP * max(1, min(programs // (_STEP * blocks * heads), tiles))
    by_split = q.new_empty(splits, *table.shape, dtype=torch.float32)
    grad = torch.empty_like(table, memory_format=torch.contiguous_format)
    launch(
        backward.grad_table,
        (splits * heads, blocks),
        *(grad, by_split, program_counters(q, blocks * heads)),
        *(ds, q, position_bias.contiguous(), *_sizes(layout_q, layout_k, table, ds)),
        *(splits, scale, heads, *q.stride()[:2], *bounds(context, layout_k)),
        **_options(width, block_m, block_w, warps, stages),
        maxnreg=registers,
    )
    return grad


def bounds(
    context: Context | None, layout: PackedLayout
) -> tuple[int, int, int] | tuple[None, None, None]:
    """Return the arguments of all kernels for a context: three numbers, or None without one."""
    return (None, None, None) if context is None else context.bounds(layout.rows)


def _sizes(
    layout_q: PackedLayout,
    layout_k: PackedLayout,
    table: Tensor,
    scores: Tensor,
    block_m: int | None = None,
) -> tuple[Any, ...]:
    """The arguments of all kernels for the layouts and the buffer."""
    # With ``block_m``, queries of a tile, they include the table of the tiles.
    offsets: tuple[Any, ...] = layout_q.cu_seqlens, layout_k.cu_seqlens
    if block_m is not None:
        offsets += (kept_tile_table(layout_q, _STEP * block_m),)
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


def _tiles(layout: PackedLayout, block_m: int) -> Programs:
    """Number of tiles of every second query: twice as many as of adjacent queries."""
    return tile_programs(layout, _STEP * block_m, each=_STEP, listed=True)


def _blocks_of_scores(dtype: torch.dtype, block_d: int) -> tuple[int, int, int, int]:
    """Queries of a tile, distances of a step, warps, stages; chosen to compile without spills."""
    if dtype == torch.float32:
        return 32, 32, 4, 1
    return 64, 64, 4 if block_d <= 128 else 8, 2


def _blocks_of_grad_queries(dtype: torch.dtype, block_d: int) -> tuple[int, int, int, int]:
    """Queries of a tile, keys of a step, distances of a step, warps."""
    # The loads use one stage: pipelined copies of pairs of elements would take twice the
    # instructions and have bank conflicts.
    if dtype == torch.float32:
        return 32 if block_d <= 128 else 16, 16, 32, 8
    return 64 if block_d <= 64 else 32, 64, 32, 4 if block_d <= 128 else 8


def _blocks_of_grad_table(dtype: torch.dtype, width: int) -> tuple[int, int, int, int, int | None]:
    """Queries of a step, distances of a block, warps, stages, most registers of a thread."""
    # Most sequences have few steps of a block, so steps are short, to waste less of the last one,
    # and are not pipelined. The registers of wide heads are limited to what the loop takes, as the
    # addition of the splits would take more; not for widths that are not read in vectors, where
    # the loop takes all.
    block_d = padded_width(width)
    if dtype == torch.float32:
        return 32 if block_d <= 128 else 16, 32, 8, 1, None
    if block_d <= 64:
        return 16, 64, 4, 1, None
    warps, registers = (4, 168) if block_d <= 128 else (8, 128)
    return 16, 64, warps, 1, registers if width % 16 == 0 else None
