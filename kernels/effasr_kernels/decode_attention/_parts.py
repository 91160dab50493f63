"""Division of the keys of a sequence among programs, their addresses, and the merge of the parts.

The division depends only on the sequence's length, so the order of sums does not depend on other
sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate_part(length, splits, BLOCK_N: tl.constexpr):
    """The first key and one past the last of this program's part; parts are whole tiles."""
    tiles = tl.cdiv(tl.cdiv(length, BLOCK_N), splits)
    begin = tl.program_id(1) * tiles * BLOCK_N
    return begin, tl.minimum(begin + tiles * BLOCK_N, length)


@triton.jit
def locate_keys(
    table, first, n, end, pages, size, table_column, BLOCK_N: tl.constexpr, WITHIN: tl.constexpr
):
    """The page and the row in it, int64, of the keys ``first + n``, and whether the page exists.

    Args:
        table: int32, a pointer to the sequence's row of the page table.
        first: The first key of the tile.
        n: (BLOCK_N,), keys within the tile.
        end: One past the last key.
        pages: P.
        size: B.
        table_column: Elements from one entry of the table to the next.
        BLOCK_N: Keys of a tile.
        WITHIN: Whether a tile lies within one page. Then the page is a scalar, and the row is that
            of the first key.
    """
    if WITHIN:
        page = tl.load(table + first // size * table_column)
        key = first % size
    else:
        page = tl.load(table + (first + n) // size * table_column, mask=first + n < end, other=0)
        key = (first + n) % size
    exists = (page >= 0) & (page < pages)
    return tl.where(exists, page, 0).to(tl.int64), key.to(tl.int64), exists


@triton.jit
def point(x, page, key, n, d, x_page, x_key, WITHIN: tl.constexpr):
    """Pointers to the tile of keys at `locate_keys`, (BLOCK_N, BLOCK_D)."""
    if WITHIN:
        place = x + (page * x_page + key * x_key) + n[:, None] * x_key
    else:
        place = x + (page * x_page + key * x_key)[:, None]
    return place + d[None, :]


@triton.jit
def move_row(new, x, page, key, d, x_page, x_key, in_width, is_written):
    """Return a new row of keys or values, (BLOCK_D,), and write it to its page if asked.

    Args:
        new: The row.
        x: A pointer to the head in the pages.
        page: The page, int64.
        key: The row in the page, int64.
        d: (BLOCK_D,), the channels.
        x_page: Page stride of ``x``.
        x_key: Row stride of ``x``.
        in_width: bool (BLOCK_D,), the channels that exist.
        is_written: Whether this program writes it.
    """
    row = tl.load(new + d, mask=in_width, other=0.0)
    tl.store(x + page * x_page + key * x_key + d, row, mask=in_width & is_written)
    return row


@triton.jit(do_not_specialize=["splits", "count"])
def merge_parts(
    partial,
    statistics,
    out,
    splits,
    count,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Merge the parts of a query and head: program (n * H + h).

    Args:
        partial: float32 (splits, N, H, D), contiguous.
        statistics: float32 (2, splits, N, H), contiguous.
        out: (N, H, D), contiguous, written; zeros without keys.
        splits: Number of parts.
        count: N * H.
        WIDTH: D.
        BLOCK_D: The power of two that D is padded to.
        BLOCK_S: Parts per step.
    """
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    in_width = d < WIDTH
    row = tl.program_id(0).to(tl.int64)
    masses = statistics + splits.to(tl.int64) * count
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, splits, BLOCK_S):
        real = first + s < splits
        place = (first + s).to(tl.int64) * count + row
        tops = tl.load(statistics + place, mask=real, other=float("-inf"))
        mass = tl.load(masses + place, mask=real, other=0.0)
        mask = real[:, None] & in_width[None, :]
        sums = tl.load(partial + place[:, None] * WIDTH + d[None, :], mask=mask, other=0.0)
        larger = tl.maximum(largest, tl.max(tops, 0))
        pivot = tl.where(larger == float("-inf"), 0.0, larger)
        shrink, shares = tl.exp2(largest - pivot), tl.exp2(tops - pivot)
        total = total * shrink + tl.sum(mass * shares, 0)
        acc = acc * shrink + tl.sum(sums * shares[:, None], 0)
        largest = larger
    acc = acc / tl.where(total == 0, 1.0, total)
    tl.store(out + row * WIDTH + d, acc.to(out.dtype.element_ty), mask=in_width)
