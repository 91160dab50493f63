"""What is said, and by whom, when a rank dies, stops or is stuck in a read."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from effasr.optim.adamw import OptimizerConfig
from effasr.training.fault_tolerance import phase_tracker
from effasr.training.fault_tolerance.phase_tracker import PhaseTracker
from effasr.training.fault_tolerance.watchdog import EX_TEMPFAIL
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run
from tests.support.run_ranks import recipe_of, run_module, started

TIMEOUT_S = 15.0
"""A step, the first above all, may take seconds on a loaded machine, and is no stuck one."""
LONG = {"max_steps": 100_000, "checkpoint_every": 5, "timeout_s": TIMEOUT_S, "threads": 1}


def wait_for(folder: Path, step: int, processes: list[subprocess.Popen[str]]):
    def reached() -> bool:
        lines = read_lines(folder / "metrics.jsonl")
        return bool(lines) and lines[-1]["step"] >= step

    _wait(reached, f"no step {step}", processes)


def wait_for_checkpoint(folder: Path, processes: list[subprocess.Popen[str]]):
    _wait((folder / "checkpoints" / "latest").exists, "no checkpoint", processes)


def _wait(condition: Callable[[], bool], missing: str, processes: list[subprocess.Popen[str]]):
    deadline = time.perf_counter() + 240
    while not condition():
        for process in processes:
            assert process.poll() is None, process.communicate()[1]
        assert time.perf_counter() < deadline, f"{missing} within four minutes"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.representative(number=signal.SIGSTOP)
def test_a_rank_that_dies_or_stops_is_named_with_what_it_did(make_config, tmp_path, number):
    with started("effasr.train", recipe_of(make_config(training=LONG))) as processes:
        # Ranks say once a second what they do.
        wait_for(tmp_path / "run", 1, processes)
        time.sleep(2.0)
        processes[1].send_signal(number)
        # It ends by itself: the limit of the test is far from the limit of training.
        _, error = processes[0].communicate(timeout=8 * TIMEOUT_S)
    assert processes[0].returncode == EX_TEMPFAIL, error
    last = read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    *_, line = (line for line in error.splitlines() if line.startswith("effasr train:"))
    result = re.search(
        r"rank 0: step (\d+), "
        r"(?:(?:computing|waiting for the others), utterances train-\d+|saving a checkpoint)",
        line,
    )
    assert result, line
    assert int(result[1]) - last in (0, 1)
    assert re.search(r"cannot reach the others\. Rank 1 no longer answers: \d+ s ago it", line)
    assert re.search(r"was at step \d+, (computing, utterances train-|loading|saving|wait)", line)
    assert "A restart continues from the last checkpoint" in line


@pytest.mark.slow
def test_a_read_that_never_returns_is_named(make_config, tones, tmp_path, monkeypatch):
    """In a process that loads, for which the one that trains waits."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("EFFASR_TEST_PIPE", str(tmp_path / "pipe"))
    # Longer than the first batch takes on a busy machine.
    loop = LONG | {"timeout_s": 60.0, "data_timeout_s": 10.0}
    path = recipe_of(make_config(data={"workers": 1}, training=loop))
    began = time.perf_counter()
    with started("tests.training.faulty", "stuck_read", path) as processes:
        results = [process.communicate(timeout=240) for process in processes]
    seconds = time.perf_counter() - began
    codes = [process.returncode for process in processes]
    assert EX_TEMPFAIL in codes, results
    stuck = codes.index(EX_TEMPFAIL)
    texts = [line for _, error in results for line in error.splitlines()]
    file = re.escape(str(tones / "train-7.wav"))
    message, *other_items = (line for line in texts if line.startswith("effasr train: rank"))
    assert not other_items
    assert re.match(
        rf"effasr train: rank {stuck}: step \d+, loading, utterances train-7 \({file}\), "
        r"for \d+\.\d s: no progress for 10 s \(training\.data_timeout_s\)",
        message,
    ), message
    # The other has nothing to add, and does not wait for its own limit.
    assert codes[1 - stuck] == 1
    assert seconds < 60


@pytest.mark.slow
def test_the_slow_rank_is_in_the_metrics(make_config, tmp_path):
    loop = LONG | {"max_steps": 24, "log_every": 8, "timeout_s": 60.0}
    path = recipe_of(make_config(training=loop))
    with started("tests.training.faulty", "slow_rank", path) as processes:
        results = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["slowest_rank"] == 1
    assert 0.05 < lines[-1]["rank_wait_s"] < 1.0
    assert re.search(
        r"rank 1 is slow: it needs 0\.\d+ s of its own for a step, .* step \d+, ", results[0][1]
    )


def test_a_rank_alone_waits_for_nobody(make_config, tmp_path):
    assert run(make_config(training={"max_steps": 1})) == 0
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert (line["slowest_rank"], line["rank_wait_s"]) == (0, 0.0)


def test_the_time_until_ranks_meet_is_a_ranks_own(batches, monkeypatch):
    now = 0.0

    def wait(seconds: float):
        nonlocal now
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now)
    monkeypatch.setattr(phase_tracker, "time", clock)
    phases = PhaseTracker()
    for step in (1, 2):
        phases.begin("loading", step)
        wait(0.02)
        phases.begin("waiting for the others", batches=batches[:2])
        assert phases.utterances == [*batches[0].ids, *batches[1].ids]
        # What the ranks exchange before.
        wait(0.05)
        phases.compute(batches[0])
        wait(0.03)
        phases.compute(batches[1])
        assert phases.utterances == list(batches[1].ids)
        phases.wait_for_ranks()
        wait(0.05)
        phases.wait_for_ranks()
    assert phases.steps == 2
    assert phases.seconds == pytest.approx(2 * (0.02 + 0.03))


@pytest.mark.slow
def test_a_killed_run_goes_on_on_more_ranks_and_on_fewer(make_config, tmp_path):
    """No step is lost or made twice, whoever makes it."""
    settings = {
        # The gradient of a key's bias is rounding noise, which Adam would magnify.
        "optimizer": OptimizerConfig(eps=1e-4),
        "data": {"micro_batches": 3},
    }
    loop = {"max_steps": 24, "checkpoint_every": 5, "timeout_s": 30.0, "threads": 1}
    assert run(make_config(name="straight", training=loop, **settings)) == 0
    path = recipe_of(make_config(training=loop | {"stop_at": 18}, **settings))
    with started("effasr.train", path) as processes:
        wait_for(tmp_path / "run", 7, processes)
        # The checkpoint of step 5 is written while training goes on.
        wait_for_checkpoint(tmp_path / "run", processes)
        for process in processes:
            process.kill()
    done = run_module("effasr.train", path, size=3)
    assert [item.returncode for item in done] == [0] * 3, done
    assert "3 x cpu" in done[0].stderr
    assert "continuing from step" in done[0].stderr
    assert run(make_config(training=loop, **settings)) == 0
    ours, theirs = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("run", "straight"))
    assert [line["step"] for line in ours] == list(range(1, 24 + 1))
    for name in ("loss", "tokens", "audio_seconds", "epoch"):
        expected = [line[name] for line in theirs]
        assert [line[name] for line in ours] == pytest.approx(expected, rel=1e-4), name
