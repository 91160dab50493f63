"""Kernels counted without a GPU, compiled ahead of the benchmarks, and tiles of attention."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import aot
import pytest
import torch
import triton
import triton.language as tl
from benchmarks import harness, kernels
from emulator.emulate import binaries, emulated
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from effasr_kernels import PackedLayout, attention, depthwise_conv
from effasr_kernels.attention.triton import backend
from effasr_kernels.attention.triton.config import Config
from effasr_kernels.runtime.launch import Launch, diverted, launch, recording
from tests.profiling.test_emulator import pytestmark as where_it_can_run


@triton.jit
def gather(values, out, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """One number of each of so many."""
    column = tl.arange(0, BLOCK)
    tl.store(out + column, tl.load(values + column * STRIDE))


class TestCounts:
    pytestmark = where_it_can_run

    @pytest.mark.parametrize(("stride", "sectors"), [(2, 2), (8, 8), (16, 8)])
    def test_scattered_loads_are_counted(self, stride: int, sectors: int) -> None:
        """128 numbers of 4 bytes, 16 sectors when they are neighbours, here a multiple of them."""
        values, out = torch.arange(2048.0), torch.zeros(128)
        before = {id(binary) for binary in binaries()}
        with emulated(90, counted=True):
            launch(gather, (1,), values, out, STRIDE=stride, BLOCK=128)
        assert torch.equal(out, values[: 128 * stride : stride])
        (binary,) = (x for x in binaries() if id(x) not in before)
        works = [work for work in kernels.lines_of(binary).values() if work["sectors"]]
        assert sum(work["needed"] for work in works) == 32
        assert sum(work["sectors"] for work in works) == 16 * (sectors + 1)

    def test_kernels_of_an_operation_are_listed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        command = ["--op", "attention", "--kind", "causal", "--frames", "30", "--head-width", "16"]
        command += ["--vocabulary", "64", "--output", str(tmp_path / "counts.csv")]
        assert kernels.counts(command) == 0
        printed = capsys.readouterr().out
        assert "attention causal" in printed
        rows = list(harness.read(tmp_path / "counts.csv"))
        issued = {row["kernel"]: row for row in rows}
        for name in ("attention_forward", "attention_backward_kv", "attention_backward_q"):
            assert int(issued[name]["issued"]) > 100
        # What has run before is listed again, with the counts of one run.
        assert kernels.counts(command) == 0
        assert capsys.readouterr().out == printed


def test_host_times_of_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "host.csv"
    options = ["--op", "rms_norm", "mask_features", "--repeats", "1", "--output", str(path)]
    assert kernels.host(options) == 0
    rows = list(harness.read(path))
    assert {row["example"].split(",")[0] for row in rows} == {"rms_norm", "mask_features"}
    for row in rows:
        assert float(row["no_grad_us"]) > 0
        assert bool(row["both_us"]) == row["example"].startswith("rms_norm")
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 1


# --- launches -------------------------------------------------------------------------------------


def convolve() -> None:
    layout = PackedLayout.from_lengths([5, 3])
    x, weight = torch.zeros(8, 16, dtype=torch.bfloat16), torch.zeros(16, 3, dtype=torch.bfloat16)
    depthwise_conv(x, weight.T.contiguous().T, layout, backend="triton")


def launches() -> list[Any]:
    with recording() as recorded:
        convolve()
    return recorded


def test_each_kernel_falls_to_one_process() -> None:
    recorded = launches()
    compiled: list[str] = []
    shares = [kernels.Compiler((n, 3), compiled.append) for n in range(3)]  # type: ignore[arg-type]
    for share in shares:
        for item in [*recorded, *recorded]:
            share(item)
    assert sum(len(share.compiled) for share in shares) == len(compiled)
    assert set.union(*(share.compiled for share in shares)) == shares[0].seen
    assert len(compiled) == len(shares[0].seen) >= 1
    # No program, no launch, and nothing to compile.
    empty = kernels.Compiler((0, 1), compiled.append)  # type: ignore[arg-type]
    empty(replace(recorded[0], grid=(0,)))
    assert not empty.seen


class _Driver:
    """An H200 that compiles, and on which nothing can run."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def test_what_is_compiled_ahead_is_found_by_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real compiler, with its cache on the disk; a second process would read it."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    (first,) = launches()[:1]
    first.kernel.device_caches.clear()
    monkeypatch.setattr(driver, "_active", _Driver())
    hits: list[bool] = []
    listen = lambda **event: hits.append(event["cache_hit"])
    monkeypatch.setattr(knobs.compilation, "listener", listen)
    try:
        kernels.warm_up(first)
        # As in another process: what this one remembers is gone.
        first.kernel.device_caches.clear()
        kernels.warm_up(first)
    finally:
        first.kernel.device_caches.clear()
    assert hits == [False, True]
    assert list(tmp_path.rglob("*.cubin"))


def seen_in_training(layers: int, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    options = ["--compile", "--model", "small", "--frame-budget", "100", "--utterances", "60"]
    parsed: list[Any] = []
    monkeypatch.setattr(kernels, "_compile_share", lambda options: parsed.append(options) or 0)
    assert kernels.launch([*options, "--longest", "4", "--share", "0/1"]) == 0
    change = lambda x, **fields: replace(
        x, **fields | ({"layers": layers} if "layers" in fields else {})
    )
    monkeypatch.setattr(kernels, "replace", change)
    seen: list[Launch] = []
    for _, call in kernels._calls(parsed[0]):
        with diverted(kernels.Compiler((0, 1), seen.append), (9, 0)):
            call()
    # The running statistics of all layers are arguments of one launch.
    return {repr(aot.key(x)) for x in seen if "running_statistics" not in x.kernel.fn.__module__}


def test_a_layer_of_each_kind_has_all_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    item = seen_in_training(1, monkeypatch)
    monkeypatch.undo()
    assert len(item) > 15
    assert item == seen_in_training(2, monkeypatch)


def test_a_call_that_fails_is_named_and_the_others_are_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = [("broken", lambda: [][1]), ("whole", convolve)]
    monkeypatch.setattr(kernels, "_calls", lambda options: iter(calls))
    assert kernels.launch(["--compile", "--share", "0/1"]) == 1
    visible = capsys.readouterr()
    assert visible.err == "bench launch: broken: IndexError: list index out of range\n"
    assert "2 of 2 kernels counted" in visible.out


# --- tiles ----------------------------------------------------------------------------------------


def test_tiles_have_rows(tmp_path: Path) -> None:
    path = tmp_path / "tiles.csv"
    assert kernels.tiles(["--frames", "20", "--output", str(path)]) == 0
    rows = list(harness.read(path))
    assert tuple(rows[0]) == kernels.TILE_COLUMNS
    assert [(row["kind"], row["kernel"], row["chosen"]) for row in rows] == [
        (kind, kernel, "True") for kind in ("relative", "") for kernel in kernels.CANDIDATES
    ]
    assert all(float(row["error"]) < 1e-5 for row in rows)
    assert kernels.tiles(["--frames", "20", "--budget-s", "0"]) == 1


def test_tiles_differ_in_the_kernel_that_is_asked_for() -> None:
    choose = lambda: backend.configs(torch.bfloat16, 128, (9, 0), plain=False)
    usual, other = choose(), Config(32, 128, 8, 2)
    with kernels.cut("backward_kv", other):
        assert choose() == replace(usual, backward_kv=other)
    assert choose() == usual
    # The kernels themselves are launched with it.
    q = torch.zeros(8, 1, 128, dtype=torch.bfloat16, requires_grad=True)
    with kernels.cut("backward_kv", other), recording() as launched:
        attention(q, q, q, PackedLayout.from_lengths([8]), backend="triton").sum().backward()
    (kernel,) = (x for x in launched if x.kernel.fn.__name__ == "attention_backward_kv")
    assert (kernel.constants["BLOCK_M"], kernel.constants["BLOCK_N"]) == (32, 128)
    assert kernel.options["num_warps"] == 8
