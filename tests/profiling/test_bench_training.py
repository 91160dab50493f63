"""Training throughput at tiny size: its batches, rows and recordings."""

import sys
import time
from pathlib import Path

import gpu
import pytest
import report
from benchmarks import harness, training
from benchmarks.speech import (
    Corpus,
    plan_of,
    random_batches,
    representative,
)

from effasr.data.sampling.options import StrategyOptions
from effasr.data.sampling.strategies import planner

SIZES = ["--frame-budget", "100", "--utterances", "60", "--longest", "4"]
TINY = ["--model", "small", *SIZES]


@pytest.mark.parametrize(("count", "budget"), [(300, 500), (7, 400), (1, 100)])
def test_random_batches_are_those_of_lhotse(count: int, budget: int) -> None:
    corpus = Corpus.of(count, 100, 8.0)
    options = StrategyOptions(padded=True)
    shape = corpus.shape(budget)
    made = planner("random", corpus.lengths, shape=shape, micro_batches=1, options=options)
    plan = made.plan(0)
    expected = [plan.step(n)[0].tolist() for n in range(plan.num_steps)]
    assert random_batches(corpus.lengths.frames, budget) == expected


@pytest.mark.parametrize("system", ["packed", "random", "sync_bucketed_2d"])
def test_the_timed_batches_stand_for_the_epoch(system: str) -> None:
    corpus = Corpus.of(4_000, 100, 30.0)
    plan = plan_of(system, corpus, corpus.shape(400))
    frames = corpus.lengths.frames
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
    names = ["packed_static", "packed", "random", "sync_bucketed"]
    options = [*TINY, "--steps", "2", "--output", str(output), "--systems"]
    assert training.main([*options, *names]) == 0
    rows = {row["system"]: row for row in harness.read(output)}
    assert list(rows) == names
    for row in rows.values():
        assert row["device"].startswith("cpu ")
        assert (row["frame_budget"], row["mode"]) == ("100", "eager")
        # Of both steps together, which the percentiles lie between.
        seconds = float(row["p20_s"]) + float(row["p80_s"])
        speed = 2 * float(row["audio_s"]) / seconds
        assert float(row["audio_s_per_s"]) == pytest.approx(speed, rel=0.02)
    assert float(rows["packed"]["padding_frames"]) == 0
    assert 0 < float(rows["random"]["padding_frames"]) < 1
    assert capsys.readouterr().out.endswith("bench training: 4 of 4 measured\n")


def test_a_row_has_the_mode_that_was_asked_for() -> None:
    setup = training.Setup.of(training._parser().parse_args(TINY), "small")
    batches = setup.batches(training.STATIC, 1)
    trained = {}
    for mode in training.MODES:
        changed = setup.with_mode(mode)
        prepared = training.Prepared(training.STATIC, changed, batches, lambda number: None, {})
        row = training.row_of(prepared, 0, [1.0], None)
        assert row["mode"] == mode
        assert (row["graph"], row["compile"]) == ("graph" in mode, "compile" in mode)
        trained[mode] = changed.config
    # Each trains in a way of its own, and those that a GPU chooses from are among them.
    assert all(list(trained.values()).count(config) == 1 for config in trained.values())
    choices = [x for variant in gpu.TABLE["variants"] for x in variant["choices"].values()]
    assert {x["mode"] for x in choices if x["table"] == "training"} == set(training.MODES)


@pytest.mark.extended
def test_each_mode_has_a_process_and_a_graph_needs_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "training.csv"
    options = [*TINY, "--steps", "2", "--output", str(output)]
    options += ["--systems", "packed_static", "--modes", "graph", "eager"]
    # What cannot be measured does not stop the others, and is no failure.
    assert training.main(options) == 0
    (row,) = harness.read(output)
    assert (row["mode"], row["graph"], row["compile"]) == ("eager", "False", "False")
    visible = capsys.readouterr().out
    assert "packed_static graph left out (`training.cuda_graph` needs a GPU" in visible
    assert training.main([*options[:-1]]) == harness.LEFT_OUT


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.extended
def test_one_that_fails_or_hangs_ends_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    programs = {
        "crashed": "import os; os.abort()",
        "slow": "import time; print('compiling', flush=True); time.sleep(60)",
        "raised": "print('bench training: raised: failed: no room'); exit(1)",
        "absent": "print('bench training: absent: left out: ImportError: no x'); exit(3)",
        "well": "print('a row')",
    }
    chosen = [training.Job(None, name) for name in programs]
    began = time.monotonic()
    ended = training.run_apart(chosen, lambda job: _python(programs[job.system]), case_s=5.0)
    assert time.monotonic() - began < 50
    assert [verdict.status for verdict in ended] == ["failed", "failed", "failed", "left out", "ok"]
    assert "exit code -6" in ended[0].reason
    assert ended[1].reason.startswith("ended after 5 s; last line: compiling")
    assert ended[2].reason == "no room"
    assert ended[3].reason == "ImportError: no x"
    assert "a row" in capsys.readouterr().out
    summary = training.summarize(ended)
    assert summary.startswith("bench training: 1 of 5 measured; crashed failed (exit code -6")
    assert summary.endswith("absent left out (ImportError: no x)")
    (late,) = training.run_apart(chosen[-1:], lambda job: _python("1"), budget_s=0)
    assert (late.status, late.reason) == ("failed", "no time left of the budget")


@pytest.mark.parametrize(
    "model", ["small", *(pytest.param(x, marks=pytest.mark.extended) for x in training.CPU_MODELS)]
)
def test_transformers_trains_on_the_same(model: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    output = tmp_path / "training.csv"
    options = ["--model", model, "--frame-budget", "150", "--utterances", "20", "--steps", "1"]
    options += ["--longest", "2", "--systems", "packed_static", "transformers"]
    assert training.main([*options, "--output", str(output)]) == 0
    ours, theirs = harness.read(output)
    assert (ours["model"], ours["system"]) == (model, "packed_static")
    assert float(theirs["loss_difference"]) < 1e-3


def test_steps_are_recorded_for_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = [*TINY, "--steps", "2", "--profile", str(tmp_path), "--systems"]
    assert training.main([*record, "packed_static"]) == 0
    trace = tmp_path / "packed_static" / "rank0.json.gz"
    assert capsys.readouterr().out == f"packed_static: {trace}\n"
    made = report.make([[trace]], tmp_path / "report")
    assert made["budget"]["steps"] == 2
    assert made["budget"]["is_stepwise"]
    ranges = {phase["name"] for phase in made["ranges"]}
    assert {"forward", "backward", "update"} <= ranges
    assert {"matmul", "elementwise"} <= {category["name"] for category in made["categories"]}
    assert training.main([*record, "transformers"]) == 1
    assert "only our own steps" in capsys.readouterr().err
