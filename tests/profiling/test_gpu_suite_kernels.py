"""Kernels compiled ahead of the benchmarks, and tiles of attention."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import attention_tiles
import launch_kernels
import pytest
import torch
from suite import models, operations
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from effasr_kernels import PackedLayout, depthwise_conv
from effasr_kernels.runtime.launch import Launch, diverted, recording
from effasr_kernels.testing import aot
from effasr_kernels.update_running_statistics import _triton as update_running_statistics


def convolve() -> None:
    layout = PackedLayout.from_lengths([5, 3])
    x, weight = torch.zeros(8, 16, dtype=torch.bfloat16), torch.zeros(16, 3, dtype=torch.bfloat16)
    depthwise_conv(x, weight.T.contiguous().T, layout, backend="triton")


def launches() -> list[Any]:
    with recording() as found:
        convolve()
    return found


def test_each_kernel_falls_to_one_process() -> None:
    found = launches()
    compiled: list[str] = []
    shares = [launch_kernels.Compiler((n, 3), lambda x: compiled.append(x)) for n in range(3)]
    for share in shares:
        for launch in [*found, *found]:
            share(launch)
    assert sum(len(share.compiled) for share in shares) == len(compiled)
    assert set.union(*(share.compiled for share in shares)) == shares[0].seen
    assert len(compiled) == len(shares[0].seen) >= 1
    # No program, no launch, and nothing to compile.
    empty = launch_kernels.Compiler((0, 1), lambda x: compiled.append(x))
    empty(replace(found[0], grid=(0,)))
    assert not empty.seen


def test_what_does_not_compile_is_named_and_ends_nothing() -> None:
    def refuse(launch: Any) -> None:
        raise RuntimeError("out of registers")

    compiler = launch_kernels.Compiler((0, 1), refuse)
    for launch in launches():
        compiler(launch)
    assert compiler.failed
    assert compiler.failed[0].endswith("RuntimeError: out of registers")


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
    (launch,) = launches()[:1]
    launch.kernel.device_caches.clear()
    monkeypatch.setattr(driver, "_active", _Driver())
    hits: list[bool] = []
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda **found: hits.append(found["cache_hit"])
    )
    try:
        launch_kernels.warm_up(launch)
        # As in another process: what this one remembers is gone.
        launch.kernel.device_caches.clear()
        launch_kernels.warm_up(launch)
    finally:
        launch.kernel.device_caches.clear()
    assert hits == [False, True]
    assert list(tmp_path.rglob("*.cubin"))


def seen_in_training(layers: int, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    options = ["--compile", "--model", "small", "--frame-budget", "100", "--utterances", "60"]
    parsed: list[Any] = []
    monkeypatch.setattr(launch_kernels, "compile_all", lambda found, _: parsed.append(found) or 0)
    assert launch_kernels.main([*options, "--longest", "4"]) == 0
    kept = replace
    monkeypatch.setattr(
        launch_kernels,
        "replace",
        lambda x, **fields: kept(x, **fields | ({"layers": layers} if "layers" in fields else {})),
    )
    seen: list[Launch] = []
    compiler = launch_kernels.Compiler((0, 1), seen.append)
    for _, call in launch_kernels._calls(parsed[0]):
        with diverted(compiler, (9, 0)):
            call()
    # The running statistics of all layers are arguments of one launch.
    return {repr(aot.key(x)) for x in seen if x.kernel is not update_running_statistics.update}


def test_a_layer_of_each_kind_has_all_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    one = seen_in_training(1, monkeypatch)
    monkeypatch.undo()
    assert len(one) > 15
    assert one == seen_in_training(2, monkeypatch)


@pytest.mark.extended
def test_on_a_cpu_kernels_are_counted(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--compile", "--op", "depthwise_conv", "--frames", "40", "--processes", "1"]
    assert launch_kernels.main(options) == 0
    shown = capfd.readouterr().out
    assert "share 0 of 1: " in shown
    assert "none compiled: no GPU" in shown


@pytest.mark.parametrize("given", [["--op", "depthwise_cnov"], ["--model", "canary_2b"]])
def test_what_cannot_be_compiled_ahead_is_refused(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        launch_kernels.main(["--compile", *given])
    assert ended.value.code == 2
    assert f"argument {given[0]}: invalid choice: '{given[1]}'" in capsys.readouterr().err


def test_compiling_nothing_fails(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--compile", "--op", "depthwise_conv", "--kind", "no such", "--frames", "40"]
    assert launch_kernels.main([*options, "--share", "0/1"]) == 1
    assert "no kernel was launched: give --op or --model" in capsys.readouterr().err


def test_a_call_that_fails_is_named_and_the_others_are_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = [("broken", lambda: [][1]), ("whole", convolve)]
    monkeypatch.setattr(launch_kernels, "_calls", lambda options: iter(calls))
    assert launch_kernels.main(["--compile", "--share", "0/1"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "launch_kernels: broken: IndexError: list index out of range\n"
    assert "1 of 1 kernels counted" in shown.out


def test_a_case_is_computed_for_a_profiler() -> None:
    options = ["--once", "--op", "depthwise_conv", "--frames", "40", "--backend", "reference"]
    assert launch_kernels.main(options) == 0
    assert launch_kernels.main([*options, "--kind", "no such"]) == 1


def test_tiles_differ_in_the_kernel_that_is_asked_for() -> None:
    from effasr_kernels.attention.triton import backend
    from effasr_kernels.attention.triton.config import Config

    usual = backend.configs(torch.bfloat16, 128, (9, 0), plain=False)
    other = Config(32, 128, 8, 2)
    with attention_tiles.cut("backward_kv", other):
        found = backend.configs(torch.bfloat16, 128, (9, 0), plain=False)
    assert found == replace(usual, backward_kv=other)
    assert backend.configs(torch.bfloat16, 128, (9, 0), plain=False) == usual
    # The kernels themselves are launched with it.
    q = torch.zeros(8, 1, 128, dtype=torch.bfloat16, requires_grad=True)
    from effasr_kernels import attention

    with attention_tiles.cut("backward_kv", other), recording() as launched:
        attention(q, q, q, PackedLayout.from_lengths([8]), backend="triton").sum().backward()
    (kernel,) = (x for x in launched if x.kernel.fn.__name__ == "attention_backward_kv")
    assert (kernel.constants["BLOCK_M"], kernel.constants["BLOCK_N"]) == (32, 128)
    assert kernel.options["num_warps"] == 8


def test_the_matrix_is_of_models_that_exist() -> None:
    from effasr.model.presets import PRESETS

    assert set(models.MODELS) <= set(PRESETS)
    assert json.dumps(operations.SANITIZED)
