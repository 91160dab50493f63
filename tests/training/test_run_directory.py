"""The files of a run, and who may write them, told by processes that end, fork and are killed."""

import errno
import fcntl
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from effasr.checkpoint import load_model
from effasr.data import locks
from effasr.data.locks import LOCK, RunLock
from effasr.training.checkpointing import run_checkpoints
from effasr.training.checkpointing.run_checkpoints import RunCheckpoints
from effasr.training.run_dir import loggers
from effasr.training.run_dir.run_directory import RunDirectory, read_lines
from effasr.training.run_dir.run_log import ProgressDisplay
from effasr.training.trainer import run
from effasr.untrusted.documents import with_checksum_line
from tests.support.run_ranks import ROOT
from tests.training.test_faults import wait_for_checkpoint


def steps(path) -> list[int]:
    return [line["step"] for line in read_lines(path)]


def test_resuming_removes_what_the_lost_stretch_wrote(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.open("a: 1\n", 0)
    for step in (1, 2, 3, 4):
        run.metrics({"step": step, "loss": 0.5})
    run.validation({"step": 4, "set": "dev", "wer": 0.1})
    run.skipped({"step": 3, "utterances": ["a"]})
    # A process killed while it writes leaves half a line.
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')

    again = RunDirectory(tmp_path / "run")
    again.open("a: 2\n", 2)
    assert steps(run.path / "metrics.jsonl") == [1, 2]
    assert steps(run.path / "validation.jsonl") == steps(run.path / "skipped.jsonl") == []
    again.metrics({"step": 3})
    assert steps(run.path / "metrics.jsonl") == [1, 2, 3]
    assert (run.path / "config.yaml").read_text() == with_checksum_line("a: 2\n")


def test_a_name_with_another_line_separator_does_not_end_a_line(tmp_path):
    run = RunDirectory(tmp_path)
    run.open("", 0)
    for step in (1, 2):
        run.skipped({"step": step, "utterances": ["a\u2028b", "c\x85d"]})
    run.open("", 2)
    assert steps(tmp_path / "skipped.jsonl") == [1, 2]


def test_file_names_that_are_not_utf8_are_written_as_escapes(tmp_path):
    name = os.fsdecode(b"caf\xe9.wav")
    run = RunDirectory(tmp_path)
    run.open("", 0)
    run.dropped([{"id": "a", "audio": name}])
    run.unreadable([{"step": 1, "audio": name}])
    assert [line["audio"] for line in read_lines(tmp_path / "dropped.jsonl")] == [name]
    again = RunDirectory(tmp_path)
    again.load_state_dict(run.state_dict())
    again.open("", 1)
    assert [line["audio"] for line in read_lines(tmp_path / "unreadable.jsonl")] == [name]


def test_every_line_is_json_of_its_own_and_nan_is_null(tmp_path):
    run = RunDirectory(tmp_path)
    run.open("", 0)
    run.dropped([{"id": "ä", "reason": "too long"}, {"id": "b", "reason": "silent"}])
    lines = (tmp_path / "dropped.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["ä", "b"]
    run.metrics({"step": 1, "loss": float("nan"), "groups": [{"wer": float("inf")}]})
    assert read_lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": None, "groups": [{"wer": None}]}
    ]


def test_an_older_run_is_set_aside_under_a_free_name(tmp_path):
    run = RunDirectory(tmp_path / "run")
    assert run.set_aside() is None
    for number in (1, 2):
        run.open("", 0)
        assert run.set_aside() == tmp_path / f"run.old-{number}"
    assert not run.path.exists()


def test_a_restart_by_torchrun_keeps_the_run_that_restarted(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path / "run")

    def starts(job: str, restarts: int) -> bool:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        aside = run.restart()
        run.open("", 0)
        return aside is not None

    assert not starts("first", 0)
    assert not starts("first", 1)
    assert starts("second", 0)
    assert not starts("second", 1)
    assert not starts("second", 2)
    # Its processes ended before one of them had set aside what the second left.
    assert starts("third", 1)
    # Not counted: another node came or went.
    assert not starts("third", 0)
    with monkeypatch.context() as patch:
        # Another torchrun, of the same name, whose first processes ended at once.
        patch.setattr("os.getppid", lambda: 1)
        assert starts("third", 1)
        # Rank 0 has moved.
        patch.setattr("socket.gethostname", lambda: "another")
        assert not starts("third", 2)
        assert starts("third", 0)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert run.restart() is not None
    assert not run.path.exists()


def tensorboard_points(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert events.Tags()["tensors"] == ["validation/dev/examples/text_summary"]
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def wandb_points(folder):
    """Read the files of its offline mode: records in blocks of 32 KiB, as in logs of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    points, ids = {}, set()
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, content = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            size, kind = struct.unpack("<4xHB", data[at : at + 7])
            content, at = content + data[at + 7 : at + 7 + size], at + 7 + size
            at += -at % 32768 if -at % 32768 < 7 else 0
            if kind not in (1, 4):  # a part that is not the last
                continue
            record, content = Record.FromString(content), b""
            ids |= {record.run.run_id} if record.HasField("run") else set()
            row = {
                "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in row.items():
                is_figure = name.startswith(("train/", "validation/")) and "examples" not in name
                if is_figure:
                    points.setdefault(name, []).append((row["step"], value))
    assert ids == {json.loads((folder / "loggers.json").read_text())["wandb"]}
    return points


def mlflow_points(folder):
    from mlflow import MlflowClient

    client = MlflowClient()
    (experiment,) = [item for item in client.search_experiments() if item.name == "effasr"]
    (of_run,) = client.search_runs([experiment.experiment_id])
    assert of_run.info.status == "FINISHED"
    identifier = of_run.info.run_id
    history = {name: client.get_metric_history(identifier, name) for name in of_run.data.metrics}
    return {name: [(item.step, item.value) for item in items] for name, items in history.items()}


POINTS = {
    "tensorboard": tensorboard_points,
    "wandb": wandb_points,
    "mlflow": mlflow_points,
}


@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("name", POINTS)
def test_loggers_get_the_same_figures_and_continue_a_resumed_run(tmp_path, monkeypatch, name):
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    example = {"id": "a", "reference": "b", "hypothesis": "c"}
    for first, last in ((0, 3), (2, 4)):
        run = RunDirectory(tmp_path / "run")
        run.open("name: run\n", first, loggers=[name])
        for step in range(first + 1, last + 1):
            # The model has neither CTC nor guided attention.
            absent = {"ctc": 0.0, "guided": 0.0, "guided_on": True, "mfu": None}
            run.metrics({"step": step, "epoch": 0, "loss": float(10 * first + step)} | absent)
        run.validation({"step": last, "epoch": 0, "set": "dev", "wer": 0.5, "examples": [example]})
        run.close()
    points = POINTS[name](tmp_path / "run")
    assert points.keys() == {"train/loss", "validation/dev/wer"}
    # TensorBoard and readers of the others show the later one of a step.
    assert dict(points["train/loss"]) == {1: 1.0, 2: 2.0, 3: 23.0, 4: 24.0}
    assert dict(points["validation/dev/wer"])[4] == 0.5


@pytest.mark.parametrize("error", [ImportError("no module"), OSError("no route to host")])
@pytest.mark.parametrize("fails_at", ["begin", "figures"])
def test_a_logger_that_fails_warns_once_and_stops_nothing(
    tmp_path, monkeypatch, caplog, error, fails_at
):
    def fail(*_):
        raise error

    logger = SimpleNamespace(id="", figures=fail, text=fail, close=fail)
    kind = fail if fails_at == "begin" else lambda *_: logger
    monkeypatch.setitem(loggers.KINDS, "wandb", kind)
    run = RunDirectory(tmp_path)
    run.open("", 0, loggers=["wandb"])
    for step in (1, 2):
        run.metrics({"step": step, "loss": 1.0})
    run.close()
    (record,) = caplog.records
    assert "wandb failed and is left out" in record.message
    assert len(read_lines(run.path / "metrics.jsonl")) == 2


def test_a_slow_logger_delays_no_step_and_loses_nothing(tmp_path, monkeypatch, caplog):
    answers, received = threading.Event(), []

    def figures(values, step):
        answers.wait()
        received.append(step)

    slow = SimpleNamespace(id="", figures=figures, close=lambda: received.append("close"))
    monkeypatch.setitem(loggers.KINDS, "mlflow", lambda *_: slow)
    run = RunDirectory(tmp_path)
    run.open("", 0, loggers=["mlflow"])
    for step in (1, 2, 3):
        run.metrics({"step": step, "loss": 1.0})
    monkeypatch.setattr(loggers, "_FLUSH_S", 0.01)
    run.close()
    assert received == []
    assert "mlflow is too slow, and lacks the last figures" in caplog.text
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "logger mlflow":
            thread.join()
    assert received == [1, 2, 3, "close"]


HOLD = """
import fcntl, os, sys, time
from pathlib import Path
from effasr.data.locks import RunLock

if "lockf" in sys.argv:
    fcntl.flock = fcntl.lockf
lock = RunLock(Path(sys.argv[1]), sys.argv[2])
if "fork" not in sys.argv:
    print(-1, flush=True)
elif os.fork() == 0:
    lock.release()
    print(os.getpid(), flush=True)
    time.sleep(60)
sys.stdin.read()
lock.release()
"""


@contextmanager
def holder(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds the lock until its input ends, and its child."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *arguments], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    child = -1
    try:
        child = int(process.stdout.readline())
        yield process, child
    finally:
        process.kill()
        if child > 0:
            os.kill(child, signal.SIGKILL)
        process.communicate()


def refused(folder: Path, match: str = "must be free", **options):
    with pytest.raises(ValueError, match=match):
        RunLock(folder, "two", **options)


def test_the_second_is_told_who_trains_and_what_to_do(tmp_path):
    folder = tmp_path / "run"
    with holder(folder, "one") as (process, _):
        with pytest.raises(ValueError, match="must be free") as caught:
            RunLock(folder, "two")
        assert re.fullmatch(
            rf"`name`: the run directory {re.escape(str(folder))} must be free, "
            rf"but process {process.pid} on {re.escape(socket.gethostname())} has trained there "
            r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d: wait until it has ended, or end "
            rf"it with a checkpoint by `kill {process.pid}` on .*, or choose another `name`\.",
            str(caught.value),
        )
        process.communicate("")
    # Nothing else was there.
    assert not folder.exists()
    RunLock(folder, "two").release()


def test_a_killed_process_leaves_no_lock_not_even_in_a_forked_child(tmp_path):
    with holder(tmp_path, "one", "fork") as (process, child):
        refused(tmp_path)
        process.kill()
        process.wait()
        assert (tmp_path / LOCK).is_file()
        os.kill(child, 0)
        RunLock(tmp_path, "two").release()


def test_what_is_set_aside_takes_no_lock_along_and_the_new_folder_has_one(tmp_path):
    with closing(RunDirectory(tmp_path / "run")) as directory:
        directory.lock("one")
        # A folder with a lock alone is not worth keeping.
        assert directory.set_aside() is None
        directory.open("a: 1\n", 0)
        assert directory.set_aside() == tmp_path / "run.old-1"
        assert [file.name for file in (tmp_path / "run.old-1").iterdir()] == ["config.yaml"]
        refused(tmp_path / "run")
        RunLock(tmp_path / "run.old-1", "two").release()


def test_whoever_takes_the_place_of_a_silent_process_has_the_lock_from_then_on(tmp_path):
    """As where learners go on without rank 0, which hangs and may come back."""
    with holder(tmp_path, "one") as (process, _):
        process.send_signal(signal.SIGSTOP)
        refused(tmp_path, f"process {process.pid} ", takeover=True)
        mine = RunLock(tmp_path, "one", takeover=True)
        process.send_signal(signal.SIGCONT)
        process.communicate("")
        refused(tmp_path, f"process {os.getpid()} ")
        assert [file.name for file in tmp_path.iterdir()] == [LOCK]
        mine.release()


def test_torchrun_waits_for_a_process_that_it_has_replaced_and_for_no_other(tmp_path, monkeypatch):
    """A file server may drop the lock of a lost host only after a while."""
    waited = []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    with holder(tmp_path, "one") as (process, _):

        def end(seconds: float):
            waited.append(seconds)
            if len(waited) == 3:
                process.communicate("")

        # The lock's own clock: threads that other tests have left behind sleep, too.
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=end)
        monkeypatch.setattr(locks, "time", clock)
        for job, restarts in (("job", "0"), ("other", "1")):
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
            refused(tmp_path)
        assert not waited
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
        RunLock(tmp_path, "two").release()
    assert len(waited) == 3


def test_a_file_of_one_that_ends_meanwhile_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    """It is opened before the other removes it, and locked after."""
    first, flock = RunLock(tmp_path / "run", "one"), fcntl.flock

    def late(descriptor: int, kind: int):
        monkeypatch.setattr(fcntl, "flock", flock)
        first.release()
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    second = RunLock(tmp_path / "run", "two")
    assert json.loads((tmp_path / "run" / LOCK).read_text())["run"] == "two"
    refused(tmp_path / "run")
    second.release()


def test_locks_of_a_file_server_belong_to_processes_and_work_as_well(tmp_path, monkeypatch):
    """NFS makes POSIX locks of flock's: closing any descriptor of the file would release them."""
    monkeypatch.setattr(locks.fcntl, "flock", fcntl.lockf)
    folder = tmp_path / "run"
    with holder(folder, "one", "fork", "lockf") as (process, child):
        for _ in range(2):
            refused(folder, f"must be free, but process {process.pid} ")
        process.kill()
        process.wait()
        os.kill(child, 0)
        mine = RunLock(folder, "two")
        for _ in range(2):
            third = subprocess.run(
                [sys.executable, "-c", HOLD, str(folder), "three", "lockf"], cwd=ROOT, text=True,
                stdin=subprocess.DEVNULL, capture_output=True,
            )  # fmt: skip
            assert f"must be free, but process {os.getpid()} " in third.stderr
        mine.release()
    RunLock(folder, "three").release()


def test_without_locks_a_warning_says_so_once(tmp_path, monkeypatch, caplog):
    def refuse(descriptor: int, kind: int):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    before = len(os.listdir("/proc/self/fd"))
    for name in ("one", "two"):
        RunLock(tmp_path, name).release()
    assert len(os.listdir("/proc/self/fd")) == before
    (record,) = caplog.records
    assert "without locks (flock: Function not implemented)" in record.getMessage()


@pytest.mark.parametrize("is_saving", [False, True])
@pytest.mark.representative(is_saving=True)
def test_of_two_runs_without_locks_the_first_ends(make_config, tmp_path, monkeypatch, is_saving):
    """Else the folder would have files of both: here it has those of the second.

    It begins after the first has written a checkpoint, or while it writes one.
    """

    def refuse(descriptor: int, kind: int):
        raise OSError(errno.ENOLCK, "No locks available")

    loop, second = {"max_steps": 8, "checkpoint_every": 2}, []
    assert run(make_config(training=loop, output=str(tmp_path / "alone"))) == 0
    write, begun, has_ended = run_checkpoints.write_model, threading.Event(), threading.Event()

    def write_slowly(*arguments):
        is_first = not begun.is_set()
        begun.set()
        if is_saving and is_first:
            assert has_ended.wait(60)
        write(*arguments)

    monkeypatch.setattr(run_checkpoints, "write_model", write_slowly)
    without = SimpleNamespace(flock=refuse, LOCK_EX=fcntl.LOCK_EX, LOCK_NB=fcntl.LOCK_NB)
    monkeypatch.setattr(locks, "fcntl", without)
    advance = ProgressDisplay.advance

    def meanwhile(self, step: int):
        advance(self, step)
        if step == 3 and not second:
            assert begun.wait(60)
            if not is_saving:
                wait_for_checkpoint(tmp_path / "run", [])
            second.append(step)
            assert run(make_config(training=loop)) == 0
            has_ended.set()

    monkeypatch.setattr(ProgressDisplay, "advance", meanwhile)
    with pytest.raises(ValueError, match=f"must be free, but process {os.getpid()} on"):
        run(make_config(training=loop))
    assert second
    states = []
    for folder in (tmp_path / "alone" / "run", tmp_path / "run"):
        result = RunCheckpoints(folder / "checkpoints", keep=1).newest()
        assert result is not None
        assert result[0].name == "step_00000008"
        states.append(load_model(result[0]).model.state_dict())
        assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [*range(1, 9)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def contents(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_a_second_start_is_refused_before_it_writes_or_renames(make_config, tmp_path):
    assert run(make_config(training={"max_steps": 2, "checkpoint_every": 2})) == 0
    assert not (tmp_path / "run" / LOCK).exists()
    with holder(tmp_path / "run", "one"):
        before = contents(tmp_path)
        for restart in (False, True):
            with pytest.raises(ValueError, match="must be free"):
                run(make_config(training={"max_steps": 4, "restart": restart}))
        assert contents(tmp_path) == before
    # It was killed; the run goes on.
    assert run(make_config(training={"max_steps": 4, "checkpoint_every": 2})) == 0
    assert run(make_config(training={"max_steps": 2, "restart": True})) == 0
    assert not (tmp_path / "run.old-1" / LOCK).exists()


def test_a_start_that_fails_leaves_no_lock_and_no_folder(make_config, tmp_path):
    for _ in range(2):
        with pytest.raises(ValueError, match=r"`data\.tokenizer` must be"):
            run(make_config(output=str(tmp_path / "not" / "there"), data={"tokenizer": ""}))
        assert not list(tmp_path.iterdir())
    # What was there stays.
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match=r"`data\.tokenizer` must be"):
        run(make_config(data={"tokenizer": ""}))
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]
