"""The table of docs/fault-tolerance.md: a signal in a phase, and what is there after it."""

import os
import signal
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from effasr.distributed.process_group import DistributedContext
from effasr.training.fault_tolerance.stop import SIGNALS, StopInterrupt, StopRequest, listening
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run
from tests.support.preloaded import ROOT, Preloaded
from tests.support.run_ranks import recipe_of, started
from tests.training.test_trainer import checkpoint_steps

pytestmark = pytest.mark.slow

PAUSED = "tests.training.paused_run"
ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
    "OMP_NUM_THREADS": "1",
}

LEFT = {
    "index": ([],),
    "calibration": ([],),
    # A rank that has not yet begun the step takes part in the decision to stop after it.
    "step": ([3], [2]),
    "validation": ([2],),
    "checkpoint": ([2], [2, 3], [2, 4], [2, 4, 5]),
}
"""Checkpoints that a stop may leave. Every second step has one, and a validation after it."""


def settings(tones, phase: str) -> dict:
    loop = {"max_steps": 5, "checkpoint_every": 2, "validate_every": 2, "threads": 1, "keep": 9}
    data = {"validation": str(tones / "test.jsonl"), "cache": None}
    if phase == "calibration":
        data |= {"frame_budget": "auto"}
    if phase == "checkpoint":
        # Training goes on beside it, and would be stopped in a validation.
        loop |= {"validate_every": 100}
    return {"data": data, "training": loop}


@contextmanager
def ranks(size: int, *arguments: str, launched: bool):
    """Start ranks; yields the processes, of which the last gets the signal."""
    if not launched:
        with started(PAUSED, *arguments, size=size) as processes:
            yield processes
        return
    command = ["--standalone", "--nproc-per-node", str(size), "-m", PAUSED, *arguments]
    process = Preloaded("effasr.launch", *command, env=ENVIRONMENT)
    try:
        yield [process]
    finally:
        process.kill()
        process.communicate()


def arrive(path, *processes) -> None:
    while not path.exists():
        ended = next((process for process in processes if process.poll() is not None), None)
        assert ended is None, ended.communicate()
        time.sleep(0.02)


@pytest.mark.representative(number=signal.SIGUSR1, size=1, launched=False, phase="checkpoint")
@pytest.mark.representative(number=signal.SIGHUP, size=2, launched=False, phase="calibration")
@pytest.mark.representative(number=signal.SIGUSR2, size=2, launched=False, phase="validation")
@pytest.mark.parametrize("launched", [False, True], ids=["rank", "launcher"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("phase", LEFT)
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_training(make_config, tones, tmp_path, number, phase, size, launched):
    config = make_config(**settings(tones, phase))
    arguments = phase, str(tmp_path), "train", recipe_of(config)
    with ranks(size, *arguments, launched=launched) as processes:
        arrive(tmp_path / phase, *processes)
        processes[-1].send_signal(number)
        errors = [process.communicate(timeout=240)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == ([128 + number] if launched else [0] * size), errors
    steps = checkpoint_steps(tmp_path / "run")
    assert steps in LEFT[phase], errors
    reason = f"stopped at step {steps[-1]}; the same" if steps else "before a step was made"
    assert reason in errors[0] or steps[-1] == 5
    if phase == "checkpoint" and size == 1 and not launched:
        assert run(config) == 0
        lines = read_lines(tmp_path / "run" / "metrics.jsonl")
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]


@pytest.mark.representative(number=signal.SIGINT)
@pytest.mark.parametrize("phase", ["export", "evaluation"])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_another_command_leaves_what_was_there(
    make_config, tones, tmp_path, number, phase
):
    assert run(make_config(training={"max_steps": 1})) == 0
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("earlier\n")
    arguments = {
        "export": ["export", f"{tmp_path}/run", str(out)],
        "evaluation": [
            *("evaluate", "--run", f"{tmp_path}/run", "--manifest", f"{tones}/test.jsonl"),
            *("--output", str(out)),
        ],
    }[phase]
    process = Preloaded(PAUSED, phase, str(tmp_path), *arguments, env=ENVIRONMENT)
    try:
        arrive(tmp_path / phase, process)
        process.send_signal(number)
        out_and_error = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == (130 if number == signal.SIGINT else -number), out_and_error
    assert [path.name for path in out.iterdir()] == ["README.md"]
    assert (out / "README.md").read_text() == "earlier\n"


@pytest.fixture
def context():
    """A rank whose store takes a while to answer whether another rank was asked to stop."""
    told = threading.Event()
    store = SimpleNamespace(set=lambda *_: told.set())
    store.check = lambda _: told.is_set() or told.wait(0.5)
    store.clone = lambda: store
    return DistributedContext(0, 1, torch.device("cpu"), store=store)  # type: ignore[arg-type]


def test_a_request_of_another_rank_is_no_signal_after_the_phase(context):
    late = []
    before = signal.signal(signal.SIGTERM, lambda number, _: late.append(number))
    try:
        with listening() as stop, stop.interrupting(context):
            time.sleep(0.4)
        context.store.set("stop", "")
        time.sleep(0.5)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not late


def test_a_signal_at_the_beginning_of_a_phase_ends_it(context, monkeypatch):
    with listening() as stop:
        monkeypatch.setattr(threading.Thread, "start", lambda _: stop.note(signal.SIGUSR1))
        with pytest.raises(StopInterrupt), stop.interrupting(context):
            pytest.fail("began")


def test_a_rank_whose_peer_has_left_on_a_request_stops(context):
    context.store.set("stop", "")
    with pytest.raises(StopInterrupt), StopRequest().interrupting(context):
        raise RuntimeError("Connection closed by peer")
