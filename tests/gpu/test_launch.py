"""Launches, and the tiles on which kernels work."""

import pytest
import torch
import triton
import triton.language as tl

from effasr_kernels import BackendUnavailable, PackedLayout, depthwise_conv
from effasr_kernels.runtime.launch import INTERPRETED, launch, recording
from effasr_kernels.runtime.tiles import (
    count_tiles,
    find_tile,
    kept_tile_table,
    locate_tile,
    tile_programs,
    tile_table,
)


@triton.jit(do_not_specialize=["sequences", "rows"])
def claim_rows(cu_seqlens, owner, visits, sequences, rows, BLOCK: tl.constexpr):
    """Write down whose each row is, and how often it is visited."""
    sequence, begin, length, start = find_tile(cu_seqlens, sequences, rows, tl.program_id(0), BLOCK)
    row = start + tl.arange(0, BLOCK)
    here = begin + row
    before = tl.load(visits + here, mask=row < length, other=0)
    tl.store(visits + here, before + 1, mask=row < length)
    tl.store(owner + here, sequence, mask=row < length)


@triton.jit(do_not_specialize=["sequences", "rows"])
def write_tile(tiles, cu_seqlens, out, sequences, rows, BLOCK: tl.constexpr):
    """Write down where a tile is."""
    tile = tl.program_id(0)
    found = locate_tile(tiles, cu_seqlens, sequences, rows, tile, BLOCK)
    sequence, begin, length, start = found
    tl.store(out + tile * 4, sequence.to(tl.int64))
    tl.store(out + tile * 4 + 1, begin)
    tl.store(out + tile * 4 + 2, length.to(tl.int64))
    tl.store(out + tile * 4 + 3, start.to(tl.int64))


@pytest.mark.parametrize("tail", [0, 37])
@pytest.mark.parametrize("extra", [0, 200])
def test_tiles_cover_each_row_once(
    lengths: tuple[int, ...], tail: int, extra: int, device: torch.device
) -> None:
    total = sum(lengths)
    layout = PackedLayout.from_lengths(
        lengths, device, rows=total + tail, num_sequences=len(lengths) + extra
    )
    owner = torch.full((layout.rows,), -1, dtype=torch.int32, device=device)
    visits = torch.zeros_like(owner)
    grid = (count_tiles(layout.rows, layout.num_sequences, 16),)
    arguments = layout.cu_seqlens, owner, visits, layout.num_sequences, layout.rows
    # One warp: what another loads beside it, it would load while this one stores.
    launch(claim_rows, grid, *arguments, num_warps=1, BLOCK=16)
    assert bool((visits == 1).all())
    assert torch.equal(owner.long(), layout.sequence_ids())


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("extra", [3, 200])
def test_a_table_holds_what_a_search_finds_with_rows_first(
    lengths: tuple[int, ...], block: int, extra: int, device: torch.device
) -> None:
    layout = PackedLayout.from_lengths(
        lengths, device, rows=sum(lengths) + 37, num_sequences=len(lengths) + extra
    ).with_tile_tables()
    grid = (tile_programs(layout, block),)
    results, table = [], tile_table(layout, block)
    for tiles in (None, table):
        out = torch.full((*grid, 4), -1, dtype=torch.int64, device=device)
        arguments = layout.cu_seqlens, out, layout.num_sequences, layout.rows
        launch(write_tile, grid, tiles, *arguments, num_warps=1, BLOCK=block)
        results.append(out)
    searched, read = results
    with_rows = searched[searched[:, 3] < searched[:, 2]]
    live = int(table[0, 0])
    assert live == len(with_rows) == grid[0].live() == tile_programs(layout, block, listed=True)
    assert torch.equal(read[:live], with_rows)
    # The others have none; their programs return.
    assert not read[live:, 2:].any()


def test_programs_that_loop_are_no_more_than_tiles_have_rows(device: torch.device) -> None:
    sizes = [88] * 96
    layout = PackedLayout.from_lengths(sizes, device, rows=8_448, num_sequences=128)
    every = tile_programs(layout, 64)
    assert (every, every.live()) == (261, 192)
    assert (tile_programs(layout, 64, each=2), tile_programs(layout, 64, times=8)) == (522, 1185)
    for others, expected in ((1, 261), (3, 176), (4, 132), (8, 132)):
        looping = tile_programs(layout, 64, others)
        assert (looping, looping.live()) == (expected, min(expected, 192))


def test_a_layout_makes_each_table_once(device: torch.device) -> None:
    layout = PackedLayout.from_lengths([20, 3], device)
    assert kept_tile_table(layout, 16) is None
    shared = layout.with_tile_tables()
    with recording() as launches:
        tables = [tile_table(shared, block) for block in (16, 32, 16)]
    assert [x.constants for x in launches] == [{"BLOCK": 16}, {"BLOCK": 32}]
    assert tables[0] is tables[2]
    assert tables[0] is not tables[1]
    # Layouts of other offsets, and of offsets that will be overwritten, begin without tables.
    for other in (shared.scaled(2), shared.lengthened(1), shared.rewritable(), shared.to(device)):
        assert other.tile_tables is None
    assert shared.with_tile_tables().tile_tables == {}


def test_the_interpreter_refuses_bfloat16(device: torch.device) -> None:
    if not INTERPRETED:
        pytest.skip("elsewhere it is computed right")
    layout = PackedLayout.from_lengths([3])
    x, weight = torch.zeros(3, 2).bfloat16(), torch.zeros(2, 3).bfloat16()
    with pytest.raises(BackendUnavailable, match="interpreter computes bfloat16 wrongly"):
        depthwise_conv(x, weight, layout, backend="triton")
    with pytest.raises(RuntimeError, match="claim_rows: Triton's interpreter computes bfloat16"):
        launch(claim_rows, (1,), layout.cu_seqlens, x, x, 1, 3, BLOCK=16)
