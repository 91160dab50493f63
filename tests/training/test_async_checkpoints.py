"""Checkpoints that are written while training goes on."""

import logging
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from effasr.checkpoint import load_model, resolve
from effasr.data.tokenizer import train_tokenizer
from effasr.distributed.failures import TrainingFailed
from effasr.model.asr import ASRModel
from effasr.training import trainer
from effasr.training.checkpointing import run_checkpoints
from effasr.training.checkpointing.run_checkpoints import RunCheckpoints
from effasr.training.trainer import run


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    texts = {"en": ["one two three four", "five six seven eight nine"]}
    return train_tokenizer(texts, tmp_path_factory.mktemp("tokenizer"), vocab_size=24)


@pytest.fixture
def model(model_config, tokenizer) -> ASRModel:
    torch.manual_seed(0)
    return ASRModel(model_config, tokenizer.vocab_size)


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    event = threading.Event()
    write = run_checkpoints.write_model

    def waiting(*content):
        assert event.wait(30)
        write(*content)

    monkeypatch.setattr(run_checkpoints, "write_model", waiting)
    return event


def fill(model: ASRModel, value: float):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_what_is_written_is_what_was_there_when_it_was_asked_for(tmp_path, model, tokenizer, gate):
    checkpoints = RunCheckpoints(tmp_path, keep=2, background=True)
    moment = torch.full((3, 2), 1.0)
    fill(model, 1.0)
    with checkpoints:
        staged = checkpoints.stage({"optimizer/0/exp_avg": moment})
        path = checkpoints.save(10, model, tokenizer, {"step": 10}, staged, is_best=True)
        fill(model, 2.0)
        moment.fill_(2.0)
        assert not path.exists()
        assert not (tmp_path / "latest").exists()
        assert not (tmp_path / "best").exists()
        gate.set()
    assert (tmp_path / "latest").read_text() == (tmp_path / "best").read_text() == f"{path.name}\n"
    assert {p.unique().item() for p in load_model(path).model.parameters()} == {1.0}
    saved = run_checkpoints.tensor_files.read_whole(path / "training")
    assert torch.equal(saved["optimizer/0/exp_avg"], torch.full((3, 2), 1.0))
    assert checkpoints.newest()[1] == {"step": 10}


def test_a_second_one_waits_for_the_first_and_says_so(tmp_path, model, tokenizer, gate, caplog):
    checkpoints = RunCheckpoints(tmp_path, keep=2, background=True)
    checkpoints.save(10, model, tokenizer, {}, checkpoints.stage({}))
    threading.Timer(0.3, gate.set).start()
    with caplog.at_level(logging.WARNING, "effasr"):
        checkpoints.save(20, model, tokenizer, {}, checkpoints.stage({}))
    (line,) = caplog.messages
    assert 0.2 < float(line.split()[1]) == float(line.split()[3]) < 10
    assert "step_00000010 to be written: checkpoints are due faster" in line
    checkpoints.wait()
    assert resolve(tmp_path).name == "step_00000020"


def check_for(checkpoints: RunCheckpoints, seconds: float):
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        checkpoints.check()
        time.sleep(0.01)


def test_an_error_of_the_writer_is_one_of_the_trainer(tmp_path, model, tokenizer):
    checkpoints = RunCheckpoints(tmp_path, keep=2, background=True)
    checkpoints.save(10, model, tokenizer, {}, checkpoints.stage({}))
    checkpoints.wait()
    (tmp_path / ".step_00000020.partial").write_text("no folder")
    checkpoints.save(20, model, tokenizer, {}, checkpoints.stage({}))
    with pytest.raises(OSError, match="step_00000020"):
        check_for(checkpoints, 10.0)
    checkpoints.check()
    assert resolve(tmp_path).name == "step_00000010"


def test_a_run_whose_disk_is_full_ends_with_the_reason(make_config, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_checkpoints, "write_model", full)
    with pytest.raises(
        OSError, match=r"step_00000004 cannot be written; is the disk full\? .*No s"
    ):
        run(make_config())


def test_a_run_that_fails_waits_for_the_checkpoint_under_way(make_config, tmp_path, monkeypatch):
    write = run_checkpoints.write_model

    def slow(*content):
        time.sleep(0.5)
        write(*content)

    def fails(train_state, batches, step, **settings):
        if step == 4:
            raise TrainingFailed("enough")
        return steps(train_state, batches, step, **settings)

    steps = trainer.train_step
    monkeypatch.setattr(run_checkpoints, "write_model", slow)
    monkeypatch.setattr(trainer, "train_step", fails)
    assert run(make_config()) == 1
    assert resolve(tmp_path / "run").name == "step_00000004"


@pytest.mark.parametrize("background", [True, False])
def test_a_stop_waits_for_the_checkpoint(make_config, tmp_path, background):
    config = make_config(training={"stop_at": 3, "async_save": background})
    assert run(config) == 0
    assert resolve(tmp_path / "run").name == "step_00000003"


def save_until_killed(folder: Path, model: ASRModel, tokenizer, begin: int):
    checkpoints = RunCheckpoints(folder, keep=1, background=True)
    for step in range(begin, 10_000):
        fill(model, float(step))
        staged = checkpoints.stage({"moment": torch.full((100_000,), float(step))})
        checkpoints.save(step, model, tokenizer, {"step": step}, staged, is_best=step % 3 == 0)


def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path, model, tokenizer):
    draw = random.Random(0)
    last = 0
    for _ in range(10):
        child = os.fork()
        if child == 0:
            save_until_killed(tmp_path, model, tokenizer, last + 1)
        while not list(tmp_path.glob("step_*")):
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.6))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        path, state = RunCheckpoints(tmp_path, keep=1).newest()
        assert path.name == f"step_{state['step']:08d}"
        weights = {p.unique().item() for p in load_model(path).model.parameters()}
        tensors = run_checkpoints.tensor_files.read_whole(path / "training")
        assert weights == set(tensors["moment"].unique().tolist()) == {float(state["step"])}
        assert resolve(tmp_path).is_dir()
        assert state["step"] >= last
        last = state["step"]
    assert last > 3
