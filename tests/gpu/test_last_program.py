"""The last program of a group adds up what the others wrote, in the same launch."""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.runtime import counters as counting
from effasr_kernels.runtime.counters import graph_counters, program_counters
from effasr_kernels.runtime.launch import launch
from effasr_kernels.shared.last_program import is_last_program

CHANNELS, ROWS = 256, 16


@triton.jit(do_not_specialize=["parts"])
def add_rows(x, partials, sums, runs, counters, parts, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):
    """Sum x (parts * BLOCK, channels) over its rows; program (part, block of channels)."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    channels = tl.num_programs(1) * BLOCK_C
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x + row[:, None] * channels + c[None, :]), 0)
    tl.store(partials + tl.program_id(0) * channels + c, part)
    if is_last_program(counters, tl.program_id(1), parts):
        total = tl.zeros((BLOCK_C,), tl.float32)
        for number in range(parts):
            total += tl.load(partials + number * channels + c, cache_modifier=".cg")
        tl.store(sums + c, total)
        number = tl.load(runs + tl.program_id(1))
        # All warps load it, and one of them stores.
        tl.debug_barrier()
        tl.store(runs + tl.program_id(1), number + 1)


def _sums(x: Tensor, block_c: int, counters: Tensor, runs: Tensor) -> Tensor:
    parts, blocks = x.shape[0] // ROWS, CHANNELS // block_c
    partials, sums = x.new_full((parts, CHANNELS), torch.nan), x.new_empty(CHANNELS)
    arguments = x, partials, sums, runs, counters, parts
    launch(add_rows, (parts, blocks), *arguments, BLOCK=ROWS, BLOCK_C=block_c)
    return sums


@pytest.mark.parametrize("block_c", [32, 256])
@pytest.mark.parametrize("parts", [1, 2, 37])
def test_it_finds_the_parts_of_all_programs(parts: int, block_c: int, device: torch.device) -> None:
    """In two launches with the same counters; and each group has one last program."""
    blocks = CHANNELS // block_c
    counters = program_counters(torch.empty(0, device=device), blocks)
    runs = torch.zeros(blocks, dtype=torch.int32, device=device)
    for number in range(2):
        x = torch.randint(-99, 99, (parts * ROWS, CHANNELS), device=device).float()
        assert torch.equal(_sums(x, block_c, counters, runs), x.sum(0))
        assert bool((runs == number + 1).all())
        assert not counters.any()


def test_a_stream_keeps_its_counters_and_a_graph_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, capturing, zeroed = SimpleNamespace(cuda_stream=1), [False], []

    def zeros(count: int, _: torch.device) -> Tensor:
        zeroed.append(count)
        return torch.zeros(count)

    monkeypatch.setattr(counting, "_EAGER", {})
    monkeypatch.setattr(counting, "_zeros", zeros)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    like = SimpleNamespace(device=torch.device("cuda", 0))

    def counters(groups: int = 3) -> Tensor:
        return program_counters(like, groups)  # pyright: ignore[reportArgumentType]

    first = counters()
    assert counters() is first
    stream.cuda_stream = 2
    other = counters()
    assert other is not first
    stream.cuda_stream = 1
    assert counters() is first
    capturing[0] = True
    in_graph = counters()
    assert in_graph is not first
    assert counters() is not in_graph
    zeroed.clear()
    graphs = []
    for _ in range(2):
        with graph_counters():
            graphs.append(counters())
            assert counters() is graphs[-1]
            stream.cuda_stream = 2
            # A launch of the graph beside the others.
            aside = counters(7)
            assert aside is not graphs[-1]
            assert aside is not other
            stream.cuda_stream = 1
            assert counters() is graphs[-1]
            assert counters(5_000).numel() == 5_000
            assert counters().numel() == 5_000
    assert graphs[0] is not graphs[1]
    assert zeroed == [4_096, 7, 5_000] * 2
    assert counters() is not graphs[1]
    capturing[0] = False
    assert counters() is first
    assert counters(5_000).numel() == 5_000
    like.device = torch.device("cuda", 1)
    assert counters() is not other


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_replays_beside_other_launches(device: torch.device) -> None:
    x = torch.randint(-99, 99, (100 * ROWS, CHANNELS), device=device).float()
    runs = torch.zeros(8, dtype=torch.int32, device=device)
    expected = x.sum(0)
    _sums(x, 32, program_counters(x, 8), runs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), graph_counters():
        _sums(x, 32, program_counters(x, 8), runs.clone())
        captured = _sums(x, 32, program_counters(x, 8), runs.clone())
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        captured.zero_()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            graph.replay()
        found = _sums(x, 32, program_counters(x, 8), runs)
        torch.cuda.current_stream().wait_stream(aside)
        assert torch.equal(found, expected)
        assert torch.equal(captured, expected)
