"""What is said, and by whom, when a rank dies, stops, is stuck or is asked to stop."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from effasr.distributed.failures import TrainingFailed
from effasr.distributed.process_group import DistributedContext
from effasr.optim.adamw import OptimizerConfig
from effasr.training.fault_tolerance.phase_tracker import PhaseTracker
from effasr.training.fault_tolerance.stop import SIGNALS, StopInterrupt, listening
from effasr.training.fault_tolerance.watchdog import EX_TEMPFAIL, RankLost, Watchdog
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


LOST = "[/pytorch/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1. Advice. More."


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr("effasr.training.fault_tolerance.watchdog._BEAT_S", 0.1)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def make(
        rank: int, size: int = 2, reading: tuple[str, ...] = ()
    ) -> tuple[Watchdog, PhaseTracker]:
        store = PrefixStore("run", TCPStore("127.0.0.1", server.port))
        phases = PhaseTracker()
        context = DistributedContext(rank, size, torch.device("cpu"), store=store)
        return Watchdog(context, phases, 60.0, 60.0, lambda: reading), phases

    return make


def train_alone(watchdog: Watchdog):
    with watchdog:
        # The others say meanwhile what they do.
        time.sleep(0.3)
        raise RuntimeError(LOST)


def lose(watchdog: Watchdog) -> str:
    with pytest.raises(RankLost) as lost:
        train_alone(watchdog)
    assert lost.value.exit_code == 75
    return str(lost.value)


@pytest.mark.parametrize("hour", [3600.0, -3600.0])
def test_silence_does_not_depend_on_the_time_of_day(make, monkeypatch, hour):
    (first, mine), (second, other) = make(0), make(1)
    mine.begin("computing", 8)
    other.begin("loading", 8)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + hour)
    with second:
        time.sleep(0.2)
    monkeypatch.setattr(time, "time", clock)
    (ago,) = re.findall(r"no longer answers: (\S+) s ago", lose(first))
    assert 0 <= int(ago) < 60


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (("loading", 7), [
            "Rank 1 answers, but is behind: 0 s ago it was at step 7, loading",
            "utterances u7 (/far/u7.wav), for ",
        ]),
        (("computing", 8), ["All ranks answer, so the network between them may be at fault."]),
    ],
)  # fmt: skip
def test_who_answers_but_is_late_is_named_with_what_it_reads(make, phase, words):
    (first, mine), (second, other) = make(0), make(1, reading=("u7 (/far/u7.wav)",))
    mine.begin("computing", 8)
    other.begin(*phase)
    with second:
        message = lose(first)
    assert all(text in message for text in words)


def test_other_errors_are_left_alone(make):
    for error in (TrainingFailed("not finite"), ValueError("Connection"), KeyboardInterrupt()):
        watchdog, _ = make(0)
        with pytest.raises(type(error)) as selected, watchdog:
            raise error
        assert selected.value is error


def test_the_slowest_rank_since_the_last_line(make, caplog):
    ranks = [make(rank, 3) for rank in range(3)]
    first = ranks[0][0]
    with ranks[0][0], ranks[1][0], ranks[2][0]:
        assert first.slowest() == {"slowest_rank": None, "rank_wait_s": None}
        for rank, (_, phases) in enumerate(ranks):
            phases.steps, phases.seconds = 10, (2.0, 5.0, 1.0)[rank]
        time.sleep(0.5)
        assert first.slowest() == {"slowest_rank": 1, "rank_wait_s": pytest.approx(0.3)}
        for rank, (_, phases) in enumerate(ranks):
            phases.steps, phases.seconds = 40, phases.seconds + 3.0 + 18.0 * (rank == 2)
        time.sleep(0.5)
        first._judged_at -= 60
        assert first.slowest() == {"slowest_rank": 2, "rank_wait_s": pytest.approx(0.6)}
    (message,) = caplog.messages
    assert message.startswith(
        "rank 2 is slow: it needs 0.55 s of its own for a step, the median rank"
    )


_LOADS_FOR_LONG = """
import sys, time, torch
from effasr.distributed.process_group import DistributedContext
from effasr.training.fault_tolerance.phase_tracker import PhaseTracker
from effasr.training.fault_tolerance.watchdog import Watchdog

phases = PhaseTracker()
context = DistributedContext(0, 1, torch.device("cpu"))
with Watchdog(context, phases, 60.0, 4.0, lambda: ()):
    phases.begin("loading", 3)
    print("loading", flush=True)
    sys.stdin.readline()
"""


def test_a_process_that_was_suspended_is_not_stuck():
    command = [sys.executable, "-c", _LOADS_FOR_LONG]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **streams) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGSTOP)
        # Longer than the limit.
        time.sleep(7)
        process.send_signal(signal.SIGCONT)
        time.sleep(1.5)
        assert process.poll() is None
        # A read that does not return is still noticed.
        assert process.wait(60) == 75
        errors = process.stderr.read() if process.stderr else ""
    assert "this process did not run for " in errors
    assert "no progress for 4 s (training.data_timeout_s)" in errors


WORLD = DistributedContext(0, 1, torch.device("cpu"))


@pytest.mark.parametrize(
    "numbers", [*((number,) for number in SIGNALS), (signal.SIGTERM, signal.SIGINT)]
)
def test_a_signal_becomes_a_request(numbers):
    before = signal.getsignal(numbers[0])
    with listening() as request:
        assert not request
        for number in numbers:
            os.kill(os.getpid(), number)
        assert request
        assert request.received is numbers[-1]
        if signal.SIGINT in numbers:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(numbers[0]) is before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_a_data_worker_ends_on_sigterm_and_ignores_the_interrupt(number, code):
    with listening() as request:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), number)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == code
        assert not request


def test_a_phase_without_steps_ends_at_once_and_not_after_it():
    with listening() as request:
        assert request.gather(WORLD, lambda: 3) == [3]
        began = time.monotonic()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(StopInterrupt), request.interrupting(WORLD):
            time.sleep(20)
        assert time.monotonic() - began < 1
        with pytest.raises(StopInterrupt):
            request.gather(WORLD, lambda: 3)


def test_a_phase_ends_when_another_rank_is_asked_to_stop():
    store = torch.distributed.HashStore()
    world = DistributedContext(0, 2, torch.device("cpu"), store=store)
    with listening() as request:
        threading.Timer(0.5, store.set, ("stop", "")).start()
        with pytest.raises(StopInterrupt), request.interrupting(world):
            time.sleep(20)


def test_nohup_keeps_ignoring_the_hangup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not request
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_signals_are_left_alone():
    seen = []

    def listen():
        with listening() as request:
            seen.append((bool(request), signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [(False, before)]
