"""`decode_attention` in Triton.

The time is bounded by reading the keys and values once: 2 L Hk D b bytes for each sequence, with b
the bytes of an element. For 32 sequences of 375 keys (30 s, 8x subsampled) of canary_1b_flash (a
decoder with 4 layers of 8 heads of 128 channels), that is 49 MB for each layer and token in
bfloat16, or 10 us at the 4.8 TB/s of an H200; the 1.5 MFLOP of each query are negligible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.decode_attention._kernels import attend_one, attend_several
from effasr_kernels.decode_attention._parts import merge_parts
from effasr_kernels.decode_attention.definition import DecodeArguments
from effasr_kernels.runtime.launch import launch, multiprocessors, refusal
from effasr_kernels.shared.paged import refuse_pages

_WIDEST = 256
_BLOCK_G = 16
"""Queries and heads that share a load: the rows of one matrix instruction."""
_KEYS_PER_SPLIT = 256
"""Minimum keys of a split: dividing fewer saves less time than merging costs."""
_MOST_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Config:
    """Keys of a tile, warps, and pipeline stages of the loads."""

    block_n: int
    warps: int
    stages: int


def config(dtype: torch.dtype, width: int, *, shared: bool) -> Config:
    """Select by dtype, padded D, and whether queries share loads; not by length."""
    single = dtype == torch.float32
    if not shared:
        return Config(16 if width > 128 else 32, 4, 2 if single else 3)
    if single:
        # Without tensor cores, whose TF32 has only 11 bits of precision.
        return Config(32 if width <= 64 else 16, 4, 2)
    return Config(64 if width <= 64 else 32, 4, 2 if width > 128 else 3)


def default_splits(columns: int, size: int, key_heads: int, processors: int) -> int:
    """Number of parts of the keys, so that one sequence can fill a GPU; independent of N.

    Args:
        columns: M.
        size: B.
        key_heads: Hk.
        processors: Multiprocessors of the GPU.
    """
    useful = -(-columns * size // _KEYS_PER_SPLIT)
    return max(1, min(useful, 2 * processors // max(1, key_heads), _MOST_SPLITS))


def unsupported_reason(a: DecodeArguments) -> str | None:
    """The reason why this backend does not support these arguments, or None."""
    if a.q.shape[2] > _WIDEST:
        return f"supports head widths up to {_WIDEST}, not {a.q.shape[2]}"
    return refusal(a.q) or refuse_pages(a.k_pages, a.v_pages)


def run(a: DecodeArguments) -> Tensor:
    """See `effasr_kernels.decode_attention.decode_attention`."""
    q, splits = a.q, a.splits
    out = q.new_empty(q.shape)
    if not q.numel():
        return out
    count, heads, width = q.shape
    if splits is None:
        columns, (size, key_heads) = a.page_table.shape[1], a.k_pages.shape[1:3]
        splits = default_splits(columns, size, key_heads, multiprocessors(q.device))
    if splits == 1:
        _attend(a, out, None, None, splits)
        return out
    partial = q.new_empty(splits, count, heads, width, dtype=torch.float32)
    statistics = q.new_empty(2, splits, count, heads, dtype=torch.float32)
    _attend(a, None, partial, statistics, splits)
    launch(
        merge_parts,
        (count * heads,),
        *(partial, statistics, out, splits, count * heads),
        num_warps=4,
        num_stages=1,
        WIDTH=width,
        BLOCK_D=_padded(width),
        BLOCK_S=min(_MOST_SPLITS, 1 << (splits - 1).bit_length()),
    )
    return out


def _attend(
    a: DecodeArguments,
    out: Tensor | None,
    partial: Tensor | None,
    statistics: Tensor | None,
    splits: int,
) -> None:
    """Launch the kernel that writes ``out``, or ``partial`` and ``statistics``."""
    # The kernels need contiguous channels.
    q = a.q if a.q.stride(2) == 1 else a.q.contiguous()
    new_k, new_v = (
        x if x is None or x.stride(2) == 1 else x.contiguous() for x in (a.new_k, a.new_v)
    )
    k_pages, v_pages, page_table = a.k_pages, a.v_pages, a.page_table
    (count, heads, width), (sequences, columns) = q.shape, page_table.shape
    (pages, size, key_heads), block_d = k_pages.shape[:3], _padded(width)
    hypotheses, share = count // sequences, heads // key_heads
    group = hypotheses * share
    # float32 has no matrix instructions, and wide heads would need too many registers per thread.
    shared = group > 1 and not (q.dtype == torch.float32 and block_d > 128)
    choice = config(q.dtype, block_d, shared=shared)
    tensors = q, k_pages, v_pages, page_table, a.lengths.contiguous()
    written = out, partial, statistics
    sizes = splits, pages, size, columns, *page_table.stride(), count, heads
    strides = *q.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3]
    new = new_k, new_v
    new_strides = [n for x in new for n in ((0, 0) if x is None else x.stride()[:2])]
    grid = (sequences * key_heads, splits, -(-group // _BLOCK_G))
    launch(
        attend_several if shared else attend_one,
        grid if shared else (count * heads, splits),
        *(*tensors, *new, *written, *sizes, *strides, *new_strides, a.scale * math.log2(math.e)),
        num_warps=choice.warps,
        num_stages=choice.stages,
        **({"BLOCK_G": _BLOCK_G} if shared else {"STAGES": choice.stages}),
        GROUP=group if shared else hypotheses,
        SHARE=share,
        WIDTH=width,
        BLOCK_D=block_d,
        BLOCK_N=choice.block_n,
        WITHIN=size % choice.block_n == 0,
        MERGED=out is None,
    )


def _padded(width: int) -> int:
    """The power of two, at least 16, to which D is padded."""
    return max(16, 1 << (width - 1).bit_length())
