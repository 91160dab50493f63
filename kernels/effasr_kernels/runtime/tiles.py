"""Tiles of packed sequences: which rows a program works on, found on the device.

A tile lies within one sequence; the tail of a static shape counts as one more sequence, number N,
so that its rows can be set to zero. How many tiles each has depends on lengths that only the device
needs to know, so tiles have numbers with gaps: those of sequence n begin at
``cu_seqlens[n] // BLOCK + n``, which leaves room for all of them whatever the other lengths are. So
the grid depends on static numbers alone, no table is built, and the host waits for nothing. At most
one number per sequence has no rows; such a program ends at once.
"""

from __future__ import annotations

import triton
import triton.language as tl


def count_tiles(rows: int, sequences: int, block: int) -> int:
    """How many tile numbers there are, for a grid: tiles of ``block`` rows, gaps included."""
    return rows // block + sequences + 1 if rows else 0


@triton.jit
def find_tile(cu_seqlens, sequences, rows, tile, BLOCK: tl.constexpr):
    """Find the rows of a tile.

    Args:
        cu_seqlens: int32 (N + 1,), a pointer.
        sequences: N.
        rows: Of the packed tensor, the tail included.
        tile: The number of the tile, in ``[0, count_tiles(rows, sequences, BLOCK))``.
        BLOCK: Rows of a tile.

    Returns:
        The sequence, N for the tail; its first row, int64; its length; the tile's first row within
        the sequence. There is no tile of this number where that is not less than the length.
    """
    # How many sequences begin their numbers at or before this one; the last of them has it. Those
    # before ``early`` do, as none begins past the last row: of thousands few are looked at.
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
    """The first row of a sequence, int64, and its length; number N, the tail, has no rows."""
    begin = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1, mask=sequence < sequences, other=begin)
    return begin.to(tl.int64), end - begin
