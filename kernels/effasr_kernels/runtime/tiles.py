"""Tiles of packed sequences: the rows that a program processes, computed on the device.

A tile lies within one sequence; the tail of a static shape counts as sequence number N, so that its
rows can be set to zero. The tiles of sequence n are numbered from ``cu_seqlens[n] // BLOCK + n``,
which leaves enough numbers for all of them whatever the other lengths are. So the grid depends only
on static sizes, and the host neither builds a table nor waits for the device. At most one number
per sequence has no rows; its program returns at once.
"""

from __future__ import annotations

import triton
import triton.language as tl


def count_tiles(rows: int, sequences: int, block: int) -> int:
    """Number of tile numbers, for a grid: tiles of ``block`` rows, including unused numbers."""
    return rows // block + sequences + 1 if rows else 0


@triton.jit
def find_tile(cu_seqlens, sequences, rows, tile, BLOCK: tl.constexpr):
    """Find the rows of a tile.

    Args:
        cu_seqlens: int32 (N + 1,), a pointer.
        sequences: N.
        rows: Rows of the packed tensor, including the tail.
        tile: The number of the tile, in ``[0, count_tiles(rows, sequences, BLOCK))``.
        BLOCK: Rows of a tile.

    Returns:
        The sequence, N for the tail; its first row, int64; its length; the tile's first row within
        the sequence. If the last is not less than the length, the tile has no rows.
    """
    # Counts the sequences whose numbers begin at or before this tile; the tile belongs to the last
    # of them. Sequences before ``early`` always count, so of thousands only a few are loaded.
    total = tl.load(cu_seqlens + sequences)
    early = tl.minimum(tl.maximum(tile - total // BLOCK, 0), sequences)
    index = tl.arange(0, 128)
    before = tl.zeros((128,), dtype=tl.int32)
    for first in range(early, tl.minimum(tile, sequences) + 1, 128):
        n = first + index
        begin = tl.load(cu_seqlens + n, mask=n <= sequences, other=0)
        before += ((begin // BLOCK + n <= tile) & (n <= sequences)).to(tl.int32)
    sequence = early + tl.sum(before) - 1
    begin = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1, mask=sequence < sequences, other=rows)
    start = (tile - (begin // BLOCK + sequence)) * BLOCK
    return sequence, begin.to(tl.int64), end - begin, start


@triton.jit
def find_sequence(cu_seqlens, sequences, sequence):
    """Return the first row of a sequence, int64, and its length; 0 for number N, the tail."""
    begin = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1, mask=sequence < sequences, other=begin)
    return begin.to(tl.int64), end - begin
