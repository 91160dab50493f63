"""`append_to_pages` in Triton: one copy."""

import triton
import triton.language as tl

from effasr_kernels.append_to_pages import AppendArguments
from effasr_kernels.runtime.launch import launch
from effasr_kernels.shared.paged import refuse_pages

_BLOCK = 1024


def unsupported_reason(a: AppendArguments) -> str | None:
    return refuse_pages(a.k_pages, a.v_pages)


def run(a: AppendArguments) -> None:
    k_pages, v_pages, page_table = a.k_pages, a.v_pages, a.page_table
    count, heads, width = a.k.shape
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (a.k, a.v))
    launch(
        append_rows,
        (count, -(-heads * width // _BLOCK)),
        *(k, v, k_pages, v_pages, page_table, a.positions.contiguous()),
        *(page_table.shape[1], *k_pages.shape[:2], heads),
        *(*page_table.stride(), *k.stride()[:2], *v.stride()[:2]),
        *(*k_pages.stride()[:3], *v_pages.stride()[:3]),
        num_warps=4,
        num_stages=1,
        WIDTH=width,
        BLOCK=_BLOCK,
    )


@triton.jit(do_not_specialize=["columns", "pages", "size", "table_row", "table_column"])
def append_rows(
    k,  # (N, H, D), contiguous channels
    v,  # (N, H, D), contiguous channels
    k_pages,  # (P, B, H, D), contiguous channels, written
    v_pages,  # (P, B, H, D), contiguous channels, written
    page_table,  # int32 (N, M)
    positions,  # int32 (N,), contiguous
    columns,  # M
    pages,  # P
    size,  # B
    heads,  # H
    table_row,
    table_column,
    k_row,
    k_head,
    v_row,
    v_head,
    k_page,
    k_key,
    k_page_head,
    v_page,
    v_key,
    v_page_head,
    WIDTH: tl.constexpr,  # D
    BLOCK: tl.constexpr,
):
    """Write block i of the channels of row n, if position and page are valid: program (n, i)."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    if position < 0:
        return
    column = position // size
    if column >= columns:
        return
    page = tl.load(page_table + row * table_row + column * table_column).to(tl.int64)
    if (page < 0) | (page >= pages):
        return
    key = (position % size).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head, d = channel // WIDTH, channel % WIDTH
    real = head < heads
    k_new = tl.load(k + row * k_row + head * k_head + d, mask=real)
    v_new = tl.load(v + row * v_row + head * v_head + d, mask=real)
    tl.store(k_pages + page * k_page + key * k_key + head * k_page_head + d, k_new, mask=real)
    tl.store(v_pages + page * v_page + key * v_key + head * v_page_head + d, v_new, mask=real)
