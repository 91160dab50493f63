"""Training throughput at tiny size: its batches, its rows, its recordings, and what it needs."""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import bench_training
import memory_trace
import numpy as np
import pytest
import report
import torch
from bench import rows
from bench.peer_features import parakeet_features
from bench.training import jobs as training_jobs
from bench.training.corpus import Workload, plan_of, random_batches, representative
from bench.training.systems import time_in_turns
from torch._dynamo.utils import counters

from effasr.data.features.config import FeatureConfig
from effasr.data.sampling.options import StrategyOptions
from effasr.data.sampling.strategies import planner

TINY = ["--model", "small", "--frame-budget", "100", "--utterances", "60", "--longest", "4"]


@pytest.fixture
def setup() -> bench_training.Setup:
    parser = argparse.ArgumentParser()
    bench_training.add_options(parser)
    return bench_training.Setup.of(parser.parse_args(TINY))


@pytest.mark.parametrize(("count", "budget"), [(300, 500), (7, 400), (1, 100)])
def test_random_batches_are_those_of_lhotse(count: int, budget: int) -> None:
    workload = Workload.of(count, 100, 8.0)
    shape = workload.shape(budget)
    options = StrategyOptions(padded=True)
    made = planner("random", workload.lengths, shape=shape, micro_batches=1, options=options)
    plan = made.plan(0)
    expected = [plan.step(n)[0].tolist() for n in range(plan.num_steps)]
    assert random_batches(workload.lengths.frames, budget) == expected


@pytest.mark.parametrize("system", bench_training.SYSTEMS)
def test_no_batch_is_larger_than_the_budget(system: str, setup: bench_training.Setup) -> None:
    plan = plan_of(system, setup.workload, setup.shape)
    assert all(plan)
    planned = [index for batch in plan for index in batch]
    assert len(set(planned)) == len(planned) > 50
    for batch in setup.batches(system, 3):
        assert batch.frames.rows <= 100
        if system == "packed_static":
            assert batch.frames.rows == 100


@pytest.mark.parametrize("system", ["packed", "random", "sync_bucketed_2d"])
def test_the_timed_batches_stand_for_the_epoch(system: str) -> None:
    workload = Workload.of(4_000, 100, 30.0)
    plan = plan_of(system, workload, workload.shape(400))
    frames = workload.lengths.frames
    chosen = representative(plan, frames, 40)
    assert len(chosen) == len({tuple(batch) for batch in chosen}) == 40

    def mean_frames(batches: list[list[int]]) -> float:
        return float(frames[[index for batch in batches for index in batch]].mean())

    assert mean_frames(chosen) == pytest.approx(mean_frames(plan), rel=0.04)
    if system == "sync_bucketed_2d":
        # The first ones are those of short utterances.
        assert mean_frames(plan[:40]) < 0.85 * mean_frames(plan)
    assert representative(plan[:3], frames, 5) == [*plan[:3], *plan[:2]]


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "training.csv"
    systems = ["packed_static", "packed", "random", "sync_bucketed"]
    options = [*TINY, "--steps", "2", "--output", str(output), "--systems"]
    assert bench_training.main([*options, *systems]) == 0
    with output.open(newline="") as file:
        found = {row["system"]: row for row in csv.DictReader(file)}
    assert list(found) == systems
    for row in found.values():
        assert row["device"].startswith("cpu ")
        assert row["frame_budget"] == "100"
        assert float(row["audio_s_per_s"]) > 0
    assert float(found["packed"]["padding_frames"]) == 0
    assert 0 < float(found["random"]["padding_frames"]) < 1
    assert {row["mode"] for row in found.values()} == {"eager"}
    assert capsys.readouterr().out.endswith("bench_training: 4 of 4 measured\n")


@pytest.mark.extended
def test_each_mode_has_a_process_and_a_graph_needs_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "training.csv"
    options = [*TINY, "--steps", "2", "--categories", "2", "--output", str(output)]
    options += ["--systems", "packed_static", "--modes", "graph", "eager"]
    # What cannot be measured does not stop the others, and is no failure.
    assert bench_training.main(options) == 0
    (row,) = rows.read(output)
    assert (row["mode"], row["graph"], row["compile"]) == ("eager", "False", "False")
    shown = capsys.readouterr().out
    assert "packed_static graph left out (`training.cuda_graph` needs a GPU" in shown
    parts = list(rows.read(tmp_path / "training_categories.csv"))
    assert {"matmul", "elementwise", "host gap", "idle: queued"} <= {x["category"] for x in parts}
    assert {(x["model"], x["mode"], x["steps"]) for x in parts} == {("small", "eager", "2")}
    # What a step takes belongs to one of them.
    step = float(parts[0]["step_ms"])
    assert sum(float(x["wall_ms"]) for x in parts) == pytest.approx(step, rel=1e-3)
    assert bench_training.main([*options[:-1]]) == training_jobs.LEFT_OUT


# Torch's tracer of autograd functions does so itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.extended
def test_a_compiled_step_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The default backend writes and compiles C++, which takes minutes.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    output = tmp_path / "training.csv"
    options = [*TINY, "--steps", "2", "--output", str(output), "--systems", "packed_static"]
    assert bench_training.main([*options, "--modes", "compile"]) == 0
    (row,) = rows.read(output)
    assert (row["mode"], row["graph"], row["compile"]) == ("compile", "False", "True")
    # One graph, for all steps.
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_the_rows_that_decide_most_come_first() -> None:
    models, systems = ["canary_1b_flash", "canary_180m_flash"], ["random", "packed_static"]
    found = training_jobs.jobs(models, systems, ["eager", "graph_compile"])
    assert [job.name for job in found] == [
        "canary_1b_flash packed_static",
        "canary_1b_flash packed_static graph_compile",
        "canary_180m_flash packed_static",
        "canary_180m_flash packed_static graph_compile",
        "canary_1b_flash random",
        "canary_180m_flash random",
    ]
    assert training_jobs.jobs(models, ["random"], ["compile"]) == []


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.extended
def test_one_that_fails_or_hangs_ends_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    programs = {
        "crashed": "import os; os.abort()",
        "slow": "import time; print('compiling', flush=True); time.sleep(60)",
        "raised": "print('bench_training: raised: failed: no room'); exit(1)",
        "absent": "print('bench_training: absent: left out: ImportError: no x'); exit(3)",
        "well": "print('a row')",
    }
    chosen = [training_jobs.Job(None, name) for name in programs]
    began = time.monotonic()
    found = training_jobs.run_apart(chosen, lambda job: _python(programs[job.system]), case_s=5.0)
    assert time.monotonic() - began < 50
    assert [verdict.status for verdict in found] == ["failed", "failed", "failed", "left out", "ok"]
    assert "exit code -6" in found[0].reason
    assert found[1].reason.startswith("ended after 5 s; last line: compiling")
    assert found[2].reason == "no room"
    assert found[3].reason == "ImportError: no x"
    assert "a row" in capsys.readouterr().out
    told = training_jobs.summarize(found)
    assert told.startswith("bench_training: 1 of 5 measured; crashed failed (exit code -6")
    assert told.endswith("absent left out (ImportError: no x)")
    (late,) = training_jobs.run_apart(chosen[-1:], lambda job: _python("1"), budget_s=0)
    assert (late.status, late.reason) == ("failed", "no time left of the budget")


def test_the_reason_of_what_is_not_installed_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object) -> None:
        # As transformers begins them.
        raise ImportError("\nCanary requires the x library\nbut it was not found")

    monkeypatch.setattr(bench_training.Prepared, "of", missing)
    assert bench_training.main([*TINY, "--systems", "transformers"]) == training_jobs.LEFT_OUT
    expected = "transformers: left out: ImportError: Canary requires the x library but it was not"
    assert expected in capsys.readouterr().err


def test_features_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.23")
    rng = np.random.default_rng(0)
    # The longest fills its encoder frames, and is a whole number of hops.
    audio = [rng.standard_normal(n).astype(np.float32) for n in (16_000, 20_480, 4_321)]
    ours = parakeet_features(FeatureConfig(mel_bins=64), audio)
    theirs = transformers.ParakeetFeatureExtractor(feature_size=64)(
        audio, sampling_rate=16_000, return_tensors="pt", padding=True
    )
    assert torch.equal(ours["attention_mask"], theirs["attention_mask"])
    torch.testing.assert_close(
        ours["input_features"], theirs["input_features"], atol=2e-3, rtol=1e-3
    )
    with pytest.raises(ValueError, match="must hold at least one utterance"):
        parakeet_features(FeatureConfig(mel_bins=64), [])


def test_the_same_steps_whatever_was_measured_before(setup: bench_training.Setup) -> None:
    before = [value.clone() for value in setup.model.state_dict().values()]
    bench_training.run_systems([bench_training.Prepared.of("packed", setup, 1, 1)], 1)
    after = setup.model.state_dict().values()
    assert all(map(torch.equal, before, after))


def test_transformers_trains_on_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    output = tmp_path / "training.csv"
    options = [*TINY, "--steps", "1", "--systems", "transformers", "--output", str(output)]
    assert bench_training.main(options) == 0
    (row,) = rows.read(output)
    assert float(row["loss_difference"]) < 1e-3


def test_steps_are_recorded_for_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = [*TINY, "--steps", "2", "--profile", str(tmp_path), "--systems"]
    assert bench_training.main([*record, "packed_static"]) == 0
    trace = tmp_path / "packed_static" / "rank0.json.gz"
    assert capsys.readouterr().out == f"packed_static: {trace}\n"
    found = report.make([[trace]], tmp_path / "report")
    assert found["budget"]["steps"] == 2
    assert found["budget"]["is_stepwise"]
    ranges = {phase["name"] for phase in found["ranges"]}
    assert {"forward", "backward", "update"} <= ranges
    assert bench_training.main([*record, "transformers"]) == 1
    assert "only our own steps" in capsys.readouterr().err


def test_memory_over_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "memory.csv"
    assert memory_trace.main([*TINY, "--steps", "6", "--output", str(output)]) == 0
    assert [row["step"] for row in rows.read(output)] == list("123456")
    assert all(int(row["peak_bytes"]) >= int(row["allocated_bytes"]) for row in rows.read(output))
    assert memory_trace.main(["--steps", "5"]) == 2
    assert "must be more than 5" in capsys.readouterr().err


def test_only_what_comes_after_the_first_steps_is_growth() -> None:
    assert memory_trace.growth([1, 2, 3, 4, 9, 9, 9]) == 0
    assert memory_trace.growth([1, 2, 3, 4, 9, 9, 12]) == 3


def test_rows_go_to_files_of_the_same_columns_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.csv"
    assert list(rows.read(path)) == []
    rows.append(path, ["a", "b"], {"a": 1, "b": 2})
    rows.append(path, ["a", "b"], {"a": 3, "b": 4})
    assert path.read_text() == "a,b\n1,2\n3,4\n"
    with pytest.raises(ValueError, match=r"differs in c: name another file"):
        rows.append(path, ["a", "b", "c"], {})
    with pytest.raises(ValueError, match="differs in their order"):
        rows.append(path, ["b", "a"], {})


@pytest.mark.extended
def test_a_bare_machine_is_enough() -> None:
    """Without what reads audio and manifests, the model can be timed, and recorded."""
    code = """
import sys
absent = {"lhotse", "soundfile", "soxr", "jiwer", "nvtx", "tensorboard"}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import bench_inference, bench_ops, bench_training, memory_trace, report, transducer_memory
from bench.training.corpus import Workload, plan_of
workload = Workload.of(30, 100, 8.0)
for system in ("packed_static", "packed", "random"):
    assert plan_of(system, workload, workload.shape(200))
import effasr.training.build
assert not absent & set(sys.modules)
"""
    profiling = Path(bench_training.__file__).parent
    folders = [str(profiling), str(profiling / "studies")]
    run = [sys.executable, "-c", f"import sys; sys.path[:0] = {folders!r}\n{code}"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_systems_on_a_cpu_take_turns(setup: bench_training.Setup) -> None:
    order: list[tuple[str, int]] = []
    steps = [lambda number, name=name: order.append((name, number)) for name in ("a", "b")]
    timed = time_in_turns(steps, 2, 1, torch.device("cpu"))
    assert order == [(name, number) for number in range(3) for name in ("a", "b")]
    assert [len(one.seconds) for one in timed] == [2, 2]


@pytest.mark.extended
@pytest.mark.parametrize("model", ["demo", "whisper_tiny"])
def test_other_shapes_are_trained_by_both(model: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    output = tmp_path / "training.csv"
    arguments = ["--model", model, "--frame-budget", "150", "--utterances", "20", "--steps", "1"]
    chosen = ["--longest", "2", "--systems", "packed_static", "transformers"]
    assert bench_training.main([*arguments, *chosen, "--output", str(output)]) == 0
    with output.open() as table:
        ours, theirs = csv.DictReader(table)
    assert (ours["model"], ours["system"]) == (model, "packed_static")
    assert float(theirs["loss_difference"]) < 1e-3
