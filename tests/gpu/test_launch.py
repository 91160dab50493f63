"""Launches, and the tiles on which kernels work."""

import pytest
import torch
import triton
import triton.language as tl

from effasr_kernels import BackendUnavailable, PackedLayout, depthwise_conv
from effasr_kernels.runtime.launch import INTERPRETED, launch, recording
from effasr_kernels.runtime.tiles import count_tiles, find_tile


@triton.jit(do_not_specialize=["sequences", "rows"])
def claim_rows(cu_seqlens, owner, visits, sequences, rows, BLOCK: tl.constexpr):
    """Write down whose each row is, and how often it is visited."""
    sequence, begin, length, start = find_tile(cu_seqlens, sequences, rows, tl.program_id(0), BLOCK)
    row = start + tl.arange(0, BLOCK)
    here = begin + row
    before = tl.load(visits + here, mask=row < length, other=0)
    tl.store(visits + here, before + 1, mask=row < length)
    tl.store(owner + here, sequence, mask=row < length)


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


def test_a_batch_without_sequences_is_all_tail(device: torch.device) -> None:
    layout = PackedLayout.from_lengths([], device, rows=20)
    owner, visits = (torch.zeros(20, dtype=torch.int32, device=device) for _ in range(2))
    grid = (count_tiles(20, 0, 16),)
    arguments = layout.cu_seqlens, owner, visits, 0, 20
    launch(claim_rows, grid, *arguments, num_warps=1, BLOCK=16)
    assert visits.tolist() == [1] * 20
    assert count_tiles(0, 0, 16) == 0


def test_a_recorded_launch_does_not_run(device: torch.device) -> None:
    layout = PackedLayout.from_lengths([3], device)
    owner, visits = (torch.zeros(3, dtype=torch.int32, device=device) for _ in range(2))
    with recording() as launches:
        launch(claim_rows, (1,), layout.cu_seqlens, owner, visits, 1, 3, num_warps=2, BLOCK=16)
    (found,) = launches
    assert found.grid == (1,)
    assert found.constants == {"BLOCK": 16}
    assert found.options["num_warps"] == 2
    assert visits.sum() == 0


def test_the_interpreter_refuses_bfloat16(device: torch.device) -> None:
    if not INTERPRETED:
        pytest.skip("elsewhere it is computed right")
    layout = PackedLayout.from_lengths([3])
    x, weight = torch.zeros(3, 2).bfloat16(), torch.zeros(2, 3).bfloat16()
    with pytest.raises(BackendUnavailable, match="interpreter computes bfloat16 wrongly"):
        depthwise_conv(x, weight, layout, backend="triton")
    with pytest.raises(RuntimeError, match="claim_rows: Triton's interpreter computes bfloat16"):
        launch(claim_rows, (1,), layout.cu_seqlens, x, x, 1, 3, BLOCK=16)
