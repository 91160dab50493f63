"""Tiles of packed sequences: the rows that a program processes, computed on the device.

A tile lies within one sequence; the tail of a static shape counts as sequence number N, so that its
rows can be set to zero. The tiles of sequence n are numbered from ``cu_seqlens[n] // BLOCK + n``,
which leaves enough numbers for all of them whatever the other lengths are. So the grid depends only
on static sizes, and the host does not wait for the device. At most one number per sequence has no
rows; its program returns early.

A program finds its tile by a search of the offsets, or by one read of a table that a kernel has
made of them, once for all launches of a batch; see `PackedLayout.with_tile_tables`.
"""

from __future__ import annotations

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.launch import launch


def count_tiles(rows: int, sequences: int, block: int) -> int:
    """Number of tile numbers, for a grid: tiles of ``block`` rows, including unused numbers."""
    return rows // block + sequences + 1 if rows else 0


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


@triton.jit(do_not_specialize=["sequences", "rows"])
def fill_tile_table(cu_seqlens, tiles, sequences, rows, BLOCK: tl.constexpr):
    """Write the results of `find_tile` for one tile, int32 (4,): program (tile)."""
    sequence, begin, length, start = find_tile(cu_seqlens, sequences, rows, tl.program_id(0), BLOCK)
    tiles += tl.program_id(0) * 4
    tl.store(tiles, sequence)
    tl.store(tiles + 1, begin.to(tl.int32))
    tl.store(tiles + 2, length)
    tl.store(tiles + 3, start)


def tile_table(layout: PackedLayout, block: int) -> Tensor | None:
    """The results of `find_tile` for each tile, int32 (tiles, 4), made at the first request."""
    # None if the layout keeps no tables.
    tables, sequences = layout.tile_tables, layout.num_sequences
    if tables is None:
        return None
    if block not in tables:
        count = count_tiles(layout.rows, sequences, block)
        table = layout.cu_seqlens.new_empty(count, 4)
        arguments = layout.cu_seqlens, table, sequences, layout.rows
        launch(fill_tile_table, (count,), *arguments, num_warps=1, BLOCK=block)
        tables[block] = table
    return tables[block]


@triton.jit
def locate_tile(tiles, cu_seqlens, sequences, rows, tile, BLOCK: tl.constexpr):
    """The results of `find_tile`, from a table if there is one."""
    if tiles is None:
        sequence, begin, length, start = find_tile(cu_seqlens, sequences, rows, tile, BLOCK)
    else:
        sequence = tl.load(tiles + tile * 4)
        begin = tl.load(tiles + tile * 4 + 1).to(tl.int64)
        length = tl.load(tiles + tile * 4 + 2)
        # The compiler sees in a search that it is a multiple, and in a table it does not: without
        # it, no vector of elements that begins there is aligned.
        start = tl.multiple_of(tl.load(tiles + tile * 4 + 3), BLOCK)
    return sequence, begin, length, start


@triton.jit
def find_sequence(cu_seqlens, sequences, sequence):
    """Return the first row of a sequence, int64, and its length; 0 for number N, the tail."""
    begin = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1, mask=sequence < sequences, other=begin)
    return begin.to(tl.int64), end - begin
