"""Tiles of packed sequences: the rows that a program processes, computed on the device.

A tile lies within one sequence; the tail of a static shape counts as sequence number N, so that its
rows can be set to zero. A search of the offsets numbers the tiles of sequence n from
``cu_seqlens[n] // BLOCK + n``, which leaves enough numbers for all of them whatever the other
lengths are. So the grid depends only on static sizes, and the host does not wait for the device. At
most one number per sequence has no rows; its program returns early.

A table has the tiles with rows first, and their number: a kernel makes it of the offsets, once for
all launches of a batch; see `PackedLayout.with_tile_tables`. A kernel that reads one has no more
programs than the host knows that there are tiles with rows. A kernel that always reads one may
have fewer programs than that, see `tile_programs`: program p takes the tiles p, p + P, p + 2 P, ...
of P programs, up to the number of those with rows, which it reads.
"""

# pyright: reportGeneralTypeIssues=false
from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.launch import ceil_div, launch

_PROGRAMS = 528
"""Programs that fill a GPU: four for each of the 132 multiprocessors of an H200, whatever the GPU
has, as sums depend on it."""


class Programs(int):
    """Programs along an axis of a grid; ``live``, which reads lengths, counts those with rows."""

    live: Callable[[], int]


def count_tiles(rows: int, sequences: int, block: int) -> int:
    """Number of tile numbers, for a grid: tiles of ``block`` rows, including unused numbers."""
    return rows // block + sequences + 1 if rows else 0


def tile_programs(
    layout: PackedLayout,
    block: int,  # rows of a tile
    others: int | None = None,  # programs along the other axes; None if each takes one tile
    *,
    times: int = 1,  # rows of a tile for each row of the layout
    each: int = 1,  # programs of a tile
    listed: bool = False,  # whether they read the table of a layout that keeps tables
) -> Programs:
    """Programs along the axis of tiles; with ``others`` they loop, and may be fewer than tiles."""
    # There are at least rows / block tiles with rows, so that none of as many programs is idle.
    rows = layout.rows * times
    count = count_tiles(rows, layout.num_sequences, block)
    if others is not None and count:
        count = min(count, max(ceil_div(rows, block), ceil_div(_PROGRAMS, each * others)))
    elif listed and layout.tile_counts is not None:
        count = min(count, layout.tile_counts[block])
    programs = Programs(each * count)

    def live() -> int:
        lengths = *layout.lengths, layout.rows - layout.total
        return each * min(count, sum(ceil_div(n * times, block) for n in lengths))

    programs.live = live
    return programs


@triton.jit
def find_tile(cu_seqlens, sequences, rows, tile, BLOCK: tl.constexpr, times=1):
    """Find the rows of a tile; tiles are numbered below ``count_tiles(times * rows, N, BLOCK)``."""
    # `cu_seqlens` and `rows` count units of `times` rows. Returns the sequence, N for the tail; its
    # first row, int64; its length; the tile's first row within the sequence. If the last is not
    # less than the length, the tile has no rows.
    # Counts the sequences with a first tile at or before this one; the tile belongs to the last
    # of them. Sequences before ``early`` always count, so of thousands only a few are loaded.
    total = tl.load(cu_seqlens + sequences) * times
    early = tl.minimum(tl.maximum(tile - total // BLOCK, 0), sequences)
    index = tl.arange(0, 128)
    counts = tl.zeros((128,), dtype=tl.int32)
    for first in range(early, tl.minimum(tile, sequences) + 1, 128):
        n = first + index
        begin = tl.load(cu_seqlens + n, mask=n <= sequences, other=0) * times
        counts += ((begin // BLOCK + n <= tile) & (n <= sequences)).to(tl.int32)
    sequence = early + tl.sum(counts) - 1
    begin = tl.load(cu_seqlens + sequence) * times
    end = tl.load(cu_seqlens + sequence + 1, mask=sequence < sequences, other=rows) * times
    start = (tile - (begin // BLOCK + sequence)) * BLOCK
    return sequence, begin.to(tl.int64), end - begin, start


@triton.jit
def _tiles_before(cu_seqlens, sequences, rows, sequence, BLOCK: tl.constexpr):
    """Number of tiles with rows in the sequences before a sequence."""
    counts = tl.zeros((128,), dtype=tl.int32)
    for first in range(0, sequence, 128):
        n = first + tl.arange(0, 128)
        begin = tl.load(cu_seqlens + n, mask=n < sequence, other=0)
        end = tl.load(cu_seqlens + n + 1, mask=n < sequences, other=rows)
        counts += tl.where(n < sequence, tl.cdiv(end - begin, BLOCK), 0)
    return tl.sum(counts)


@triton.jit(do_not_specialize=["sequences", "rows"])
def fill_tile_table(cu_seqlens, tiles, sequences, rows, BLOCK: tl.constexpr):
    """Write the results of `find_tile` for one tile, int32 (4,): program (tile)."""
    # The first row of the table has the number of tiles with rows, which come next. A tile without
    # rows has length 0, so that its program returns.
    tile = tl.program_id(0)
    sequence, begin, length, start = find_tile(cu_seqlens, sequences, rows, tile, BLOCK)
    before = _tiles_before(cu_seqlens, sequences, rows, sequence, BLOCK)
    live = _tiles_before(cu_seqlens, sequences, rows, sequences + 1, BLOCK)
    has_rows = start < length
    behind = live + tile - before - tl.cdiv(length, BLOCK)
    tl.store(tiles, live, mask=tile == 0)
    tiles += (1 + tl.where(has_rows, before + start // BLOCK, behind)) * 4
    tl.store(tiles, sequence)
    tl.store(tiles + 1, begin.to(tl.int32))
    tl.store(tiles + 2, tl.where(has_rows, length, 0))
    tl.store(tiles + 3, tl.where(has_rows, start, 0))


def tile_table(layout: PackedLayout, block: int) -> Tensor:
    """The number of tiles with rows, these, and the others: int32 (1 + tiles, 4)."""
    # A layout that keeps tables has it made at the first request.
    tables, sequences = layout.tile_tables, layout.num_sequences
    table = None if tables is None else tables.get(block)
    if table is None:
        table = empty_tile_table(layout, block)
        arguments = layout.cu_seqlens, table, sequences, layout.rows
        launch(fill_tile_table, (len(table) - 1,), *arguments, num_warps=1, BLOCK=block)
        if tables is not None:
            tables[block] = table
    return table


def empty_tile_table(layout: PackedLayout, block: int) -> Tensor:
    count = count_tiles(layout.rows, layout.num_sequences, block)
    return layout.cu_seqlens.new_empty(1 + count, 4)


def kept_tile_table(layout: PackedLayout, block: int) -> Tensor | None:
    """The table of a layout that keeps tables, else None, for kernels that can search as well."""
    return None if layout.tile_tables is None else tile_table(layout, block)


@triton.jit
def locate_tile(tiles, cu_seqlens, sequences, rows, tile, BLOCK: tl.constexpr):
    """The results of `find_tile`, from a table if there is one."""
    if tiles is None:
        sequence, begin, length, start = find_tile(cu_seqlens, sequences, rows, tile, BLOCK)
    else:
        sequence, begin, length, start = read_tile(tiles, tile, BLOCK)
    return sequence, begin, length, start


@triton.jit
def read_tile(tiles, tile, BLOCK: tl.constexpr):
    """The results of `find_tile` from a table, for a tile below the number that it begins with."""
    tiles += 4 + tile * 4
    sequence = tl.load(tiles)
    begin = tl.load(tiles + 1).to(tl.int64)
    length = tl.load(tiles + 2)
    # The compiler sees in a search that it is a multiple, and in a table it does not: without it,
    # no vector of elements that begins there is aligned.
    start = tl.multiple_of(tl.load(tiles + 3), BLOCK)
    return sequence, begin, length, start


@triton.jit
def find_sequence(cu_seqlens, sequences, sequence):
    """Return the first row of a sequence, int64, and its length; 0 for number N, the tail."""
    begin = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1, mask=sequence < sequences, other=begin)
    return begin.to(tl.int64), end - begin
