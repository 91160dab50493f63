"""Training throughput at tiny size: its batches, its rows, its recordings, and what it needs."""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path

import bench_training
import memory_trace
import pytest
import report
import torch
from bench import rows
from bench.training_corpus import Workload, plan_of, random_batches

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
    # A CUDA graph needs a GPU; what cannot be measured does not stop the others.
    assert bench_training.main([*options, "packed_static", "packed", "--graph"]) == 1
    assert "`training.cuda_graph` needs a GPU" in capsys.readouterr().err
    assert len(list(rows.read(output))) == len(systems) + 1


def test_the_same_steps_whatever_was_measured_before(setup: bench_training.Setup) -> None:
    before = [value.clone() for value in setup.model.state_dict().values()]
    bench_training.run_system("packed", setup, 1)
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
from bench.training_corpus import Workload, plan_of
workload = Workload.of(30, 100, 8.0)
for system in ("packed_static", "packed", "random"):
    assert plan_of(system, workload, workload.shape(200))
import effasr.training.build
assert not absent & set(sys.modules)
"""
    profiling = str(Path(bench_training.__file__).parent)
    run = [sys.executable, "-c", f"import sys; sys.path.insert(0, {profiling!r})\n{code}"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
