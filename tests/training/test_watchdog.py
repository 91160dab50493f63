"""What a rank says of the others, by what they told the store."""

import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from effasr.distributed.failures import TrainingFailed
from effasr.distributed.process_group import DistributedContext
from effasr.training.fault_tolerance.phase_tracker import PhaseTracker
from effasr.training.fault_tolerance.watchdog import RankLost, Watchdog

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


def test_who_is_silent_is_named(make, batches):
    (first, mine), (second, other) = make(0), make(1)
    mine.begin("waiting for the others", 8, batches[:1])
    other.begin("loading", 8)
    other.compute(batches[1])
    with second:
        time.sleep(0.2)
    message = lose(first)
    assert message.startswith(
        "rank 0: step 8, waiting for the others, utterances 0-0, 0-1, 0-2, for "
    )
    assert " s: cannot reach the others. Rank 1 no longer answers: " in message
    assert " s ago it was at step 8, computing, utterances 1-0, 1-1, 1-2, for " in message
    assert message.endswith("(PyTorch: Connection closed by peer [127.0.0.1]:1)")


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


def test_who_answers_but_is_late_is_named_with_what_it_reads(make):
    (first, mine), (second, other) = make(0), make(1, reading=("u7 (/far/u7.wav)",))
    mine.begin("computing", 8)
    other.begin("loading", 7)
    with second:
        message = lose(first)
    assert "Rank 1 answers, but is behind: 0 s ago it was at step 7, loading" in message
    assert "utterances u7 (/far/u7.wav), for " in message


def test_where_all_are_well_it_is_the_network(make):
    (first, mine), (second, other) = make(0), make(1)
    mine.begin("computing", 8)
    other.begin("computing", 8)
    with second:
        assert "All ranks answer, so the network between them may be at fault." in lose(first)


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
            phases.steps, phases.seconds = 10, 5.0 if rank == 1 else 1.0
        time.sleep(0.5)
        assert first.slowest() == {"slowest_rank": 1, "rank_wait_s": pytest.approx(0.4)}
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
