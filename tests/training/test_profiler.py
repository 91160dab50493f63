import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from effasr import ranges
from effasr.training.profiler import ProfileConfig, StepProfiler
from effasr.training.trainer import run

CPU = SimpleNamespace(device=torch.device("cpu"), rank=0)


def names_in(path: Path) -> list[str]:
    with gzip.open(path, "rt") as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def record(capture: StepProfiler, numbers: Sequence[int]):
    for number in numbers:
        with capture.step(number), ranges.range("step", number):
            torch.ones(2) @ torch.ones(2)


@pytest.mark.parametrize(
    ("first", "steps", "numbers", "recorded"),
    [
        (0, 2, range(8), 2),
        (3, 2, range(8), 2),
        # A run that ends early.
        (2, 50, range(5), 3),
        # A step that comes twice: a synchronization of learners has the number of the step after.
        (2, 3, [*range(5), *range(4, 8)], 3),
        # A run that goes on within the steps.
        (2, 4, range(4, 9), 2),
    ],
)
def test_kineto_records_the_configured_steps_alone(tmp_path, first, steps, numbers, recorded):
    config = ProfileConfig(tool="kineto", first_step=first, steps=steps)
    capture = StepProfiler(config, CPU, tmp_path)
    record(capture, numbers)
    capture.close()
    capture.close()
    names = names_in(tmp_path / "rank0.json.gz")
    assert names.count("step") == names.count("aten::dot") == recorded
    assert ranges.range("a") is ranges.range("b")
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.json.gz"]


def test_what_the_warm_up_has_queued_ends_before_the_recording(tmp_path, monkeypatch):
    events = []
    waits = lambda self: events.append("wait")
    monkeypatch.setattr(StepProfiler, "_synchronize", waits)
    monkeypatch.setattr(torch.profiler.profile, "step", lambda self: events.append("next"))
    capture = StepProfiler(ProfileConfig(tool="kineto", first_step=2, steps=2), CPU, tmp_path)
    record(capture, range(4))
    # Before the warm-up and behind it, and before the recording ends.
    assert events == ["wait", "wait", "next", "next", "next", "wait"]


def test_nothing_is_recorded_unless_asked_or_past_the_wanted_steps(tmp_path):
    record(StepProfiler(ProfileConfig(), CPU, tmp_path), range(30))
    record(StepProfiler(ProfileConfig(tool="kineto"), CPU, tmp_path), range(25, 40))
    assert not list(tmp_path.iterdir())


def test_a_trainer_leaves_its_phases_and_layers_in_the_profile(make_config, tmp_path):
    profile = ProfileConfig(tool="kineto", first_step=1, steps=2)
    assert run(make_config(training={"max_steps": 4, "profile": profile})) == 0
    names = names_in(tmp_path / "run" / "profile" / "rank0.json.gz")
    assert names.count("step") == 2
    phases = {"data", "features", "forward", "encoder", "decoder", "cross_entropy", "backward"}
    phases |= {"update", "optimizer", "encoder.0", "decoder.0"}
    assert phases <= set(names)


def test_nsys_is_told_where_its_capture_range_begins_and_ends(tmp_path, monkeypatch):
    calls, seen = [], []
    runtime = SimpleNamespace(
        cudaProfilerStart=lambda: calls.append("start"),
        cudaProfilerStop=lambda: calls.append("stop"),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(ranges, "enable", lambda library, tool_version: seen.append(library))
    context = SimpleNamespace(device=torch.device("cuda", 0), rank=3)
    config = ProfileConfig(tool="nsys", first_step=2, steps=2, ranges="nvtx")
    capture = StepProfiler(config, context, tmp_path)
    for number in range(6):
        with capture.step(number):
            calls.append(str(number))
    assert calls == ["0", "1", "wait", "start", "2", "3", "wait", "stop", "4", "5"]
    # Once to see whether they would be lost, and once to record.
    assert seen == ["nvtx", "nvtx"]


@pytest.mark.parametrize(("tool", "is_lost"), [("2022.4.2.18", True), ("2025.1.1.1", False)])
def test_ranges_that_the_installed_nsys_would_lose_are_refused(
    tmp_path, monkeypatch, tool, is_lost
):
    pytest.importorskip("nvtx")
    program = tmp_path / "nsys"
    program.write_text(f"#!/bin/sh\necho NVIDIA Nsight Systems version {tool}-32526504v0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(ranges, "version", lambda name: "0.2.17")
    config = ProfileConfig(tool="nsys", ranges="nvtx")
    context = SimpleNamespace(device=torch.device("cuda", 0), rank=0)
    if is_lost:
        with pytest.raises(ValueError, match=r"loses every range under Nsight Systems 2022\.4"):
            StepProfiler(config, context, tmp_path)
    else:
        StepProfiler(config, context, tmp_path)
    assert ranges.range("step") is ranges.range("other")


def test_memory_is_written_when_it_runs_out(tmp_path, monkeypatch):
    memory = torch.cuda.memory
    history: list[object] = []
    monkeypatch.setattr(
        memory, "_record_memory_history", lambda enabled="all", **options: history.append(enabled)
    )
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_text("events"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    context = SimpleNamespace(device=torch.device("cuda", 0), rank=1)
    capture = StepProfiler(ProfileConfig(memory=True), context, tmp_path / "profile")
    with pytest.raises(torch.OutOfMemoryError), capture.step(0):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert (tmp_path / "profile" / "rank1_memory.pickle").read_text() == "events"
    assert history == ["all", None]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory": True}, "`training.profile.memory` must be false without a GPU"),
        ({"tool": "nsys"}, "`training.profile.tool` must be kineto or none without"),
        ({"tool": "perf"}, "`tool` must be one of none, nsys, kineto, but is 'perf'"),
        ({"steps": 0}, "`steps` must be at least 1, but is 0: tool=none"),
        ({"first_step": -1}, "`first_step` must be at least 0"),
        ({"ranges": "roctx"}, "`ranges` must be torch or nvtx"),
    ],
)
def test_error_messages(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        StepProfiler(ProfileConfig(**fields), CPU, tmp_path)
