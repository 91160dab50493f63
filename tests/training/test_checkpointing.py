"""Checkpoints that are written while training goes on, and what may go on from them."""

import json
import logging
import math
import threading
import time

import pytest
import torch

from effasr.checkpoint import load_model, resolve
from effasr.data.tokenizer import train_tokenizer
from effasr.distributed.failures import TrainingFailed
from effasr.model.asr import ASRModel
from effasr.training import trainer
from effasr.training.checkpointing import run_checkpoints
from effasr.training.checkpointing.resume import check_same_run
from effasr.training.checkpointing.run_checkpoints import RunCheckpoints
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run

SAVED = {
    "name": "a",
    "seed": 0,
    "model": {"encoder": {"layers": 2, "width": 8}, "decoder": None},
    "data": {"manifest": "m", "workers": 2},
    "optimizer": {"lr": 0.1},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "`seed` must stay 0, .* but is 1"),
        ({"data": {"manifest": "n", "workers": 2}}, "`data.manifest` must stay 'm'"),
        (
            {"model": {"encoder": {"layers": 3, "width": 8}, "decoder": None}},
            "`model.encoder.layers` must stay 2, .* but is 3.*training.restart=true",
        ),
        (
            {"model": {"encoder": {"layers": 2, "width": 8}, "decoder": {"layers": 1}}},
            "`model.decoder` must stay None",
        ),
        ({"data": {"manifest": "m", "workers": 2, "new": 1}}, "`data.new` must stay None"),
    ],
)
def test_another_model_or_another_order_of_data_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        check_same_run(SAVED, SAVED | change)


def test_other_changes_are_obeyed_and_reported():
    now = SAVED | {"optimizer": {"lr": 0.2}, "data": {"manifest": "m", "workers": 8}}
    assert check_same_run(SAVED, now) == ["data.workers: 2 -> 8", "optimizer.lr: 0.1 -> 0.2"]


def test_bad_audio_may_be_left_out_from_here_on_but_parameters_not_be_renumbered():
    saved = {"data": {"on_bad_audio": "raise"}, "optimizer": {"exempt": ["biases"]}}
    change = {"data": {"on_bad_audio": "skip"}}
    assert check_same_run(saved, saved | change) == ["data.on_bad_audio: 'raise' -> 'skip'"]
    for change in ({"exempt": ["norms"]}, {"exempt": ["biases"], "name": "lamb"}):
        with pytest.raises(ValueError, match=rf"`optimizer\.{[*change][-1]}` must stay"):
            check_same_run(saved, saved | {"optimizer": change})


def test_a_checkpoint_from_before_a_field_existed_goes_on(make_config, tmp_path):
    assert run(make_config(training={"max_steps": 2})) == 0
    path = tmp_path / "run" / "checkpoints" / "step_00000002"
    state = torch.load(path / "training.pt", weights_only=True)
    saved = state["config"]
    assert saved["data"]["max_sequences"] % 8 == 0
    saved["data"]["max_sequences"] = None  # the number by the frame budget, before there was auto
    del saved["data"]["filters"], saved["data"]["epoch_end"], saved["model"]["text_encoder"]
    del saved["model"]["encoder"]["conv_norm"], saved["training"]["async_save"]
    torch.save(state, path / "training.pt")
    (path / "manifest.json").unlink()
    sums = run_checkpoints._checksums(path, 0)
    (path / "manifest.json").write_text(json.dumps({"step": 2, "files": sums}))
    assert run(make_config(training={"max_steps": 3})) == 0
    steps = [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert steps == [1, 2, 3]
    path = path.with_name("step_00000003")
    state = torch.load(path / "training.pt", weights_only=True)
    assert state["config"]["data"]["max_sequences"] is None
    with pytest.raises(ValueError, match=r"`data\.epoch_end` must stay None"):
        run(make_config(training={"max_steps": 4}, data={"epoch_end": "exact"}))


def test_the_training_state_has_the_layout_of_earlier_checkpoints(make_config, tmp_path):
    """Components by name; how far the run has come, and what it is, are at the top."""
    assert run(make_config(training={"max_steps": 1})) == 0
    path = tmp_path / "run" / "checkpoints" / "step_00000001" / "training.pt"
    state = torch.load(path, weights_only=True)
    assert state.keys() == {
        "step", "best", "is_best", "must_validate", "config", "corpus", "epoch", "position",
        "ranks", "plan", "optimizer", "objective", "meter", "blend", "adascale", "diagnostics",
        "files", "finite_step", "division", "validation", "validations_since_best", "before",
    }  # fmt: skip
    assert (state["step"], state["epoch"], state["position"]) == (1, 0, [0, 1])
    assert (state["best"], state["is_best"], state["must_validate"]) == (math.inf, False, False)
    assert state["ranks"] == 1
    assert state["adascale"] is None
    assert state["meter"].keys() == {"sums", "skipped", "oom_splits"}
    assert state["optimizer"].keys() == {"param_groups", "state"}
    # The last with spec_augment.after_ctc alone.
    assert state["objective"].keys() == {"average", "on", "masks"}


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
