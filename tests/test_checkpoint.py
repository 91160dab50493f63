import logging
import resource
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from effasr.checkpoint import (
    CheckpointError,
    begin_folder,
    load_model,
    publish_folder,
    remove_hidden,
    resolve,
    save_model,
)
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import train_tokenizer
from effasr.model.asr import ASRModel, Durations
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.training.checkpointing.run_checkpoints import RunCheckpoints

CONFIG = ModelConfig(
    encoder=FastConformerConfig(
        width=16, layers=1, heads=2, feed_forward=16, subsampling_channels=4
    ),
    decoder=DecoderConfig(width=16, layers=1, heads=2, feed_forward=16),
    ctc=True,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    texts = {"en": ["one two three four", "five six seven eight nine"]}
    return train_tokenizer(texts, tmp_path_factory.mktemp("tokenizer"), vocab_size=24)


@pytest.fixture
def model(tokenizer):
    torch.manual_seed(0)
    return ASRModel(CONFIG, tokenizer.vocab_size)


def assert_same_weights(first, second):
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)


def test_a_model_directory_gives_back_model_and_tokenizer(tmp_path, model, tokenizer):
    model.durations = Durations(2.5, 11.0)
    save_model(tmp_path / "model", model, tokenizer)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"model.safetensors", "model.yaml", "tokenizer"}
    loaded = load_model(tmp_path / "model")
    assert loaded.model.config == CONFIG
    assert loaded.model.durations == model.durations
    assert not loaded.model.training
    assert_same_weights(loaded.model, model)
    assert loaded.tokenizer.prompt(Prompt()) == tokenizer.prompt(Prompt())
    assert loaded.tokenizer.encode("one two", "en") == tokenizer.encode("one two", "en")
    # Tied weights stay tied.
    sizes = [sum(p.numel() for p in x.parameters()) for x in (loaded.model, model)]
    assert sizes[0] == sizes[1]


def test_a_model_directory_is_replaced_but_nothing_else_is(tmp_path, model, tokenizer):
    save_model(tmp_path / "model", model, tokenizer)
    with torch.no_grad():
        model.ctc_head.bias.fill_(5.0)
    save_model(tmp_path / "model", model, tokenizer)
    assert_same_weights(load_model(tmp_path / "model").model, model)
    (tmp_path / "precious.txt").touch()
    with pytest.raises(CheckpointError, match="must be new, empty or a model directory"):
        save_model(tmp_path, model, tokenizer)
    assert (tmp_path / "precious.txt").exists()


def test_a_link_to_a_model_directory_stays_one(tmp_path, model, tokenizer):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "model"
    link.symlink_to(tmp_path / "elsewhere")
    for _ in range(2):
        save_model(link, model, tokenizer)
        assert link.is_symlink()
        assert resolve(tmp_path / "elsewhere") == tmp_path / "elsewhere"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "model"]


def test_error_messages(tmp_path, model, tokenizer):
    folder = tmp_path / "model"
    save_model(folder, model, tokenizer)
    weights, description = (folder / name for name in ("model.safetensors", "model.yaml"))
    content, text = weights.read_bytes(), description.read_text()
    other = text.replace("layers: 1", "layers: 2", 1)
    for new_content, new_text, message in (
        (content[: len(content) // 2], text, r"model\.safetensors is damaged"),
        (None, text, r"has no model\.safetensors"),
        (content, other, "of another architecture"),
        (content, "vocab_size: 3\nmodel:\n  widht: 3\n", r"model\.yaml cannot be read: .*widht"),
        (content, "a: [1", r"model\.yaml cannot be read"),
        (content, "", r"model\.yaml cannot be read"),
        (content, None, r"has no model\.yaml"),
    ):
        weights.unlink(missing_ok=True)
        description.unlink(missing_ok=True)
        if new_content is not None:
            weights.write_bytes(new_content)
        if new_text is not None:
            description.write_text(new_text)
        with pytest.raises(CheckpointError, match=message):
            load_model(folder)
    with pytest.raises(ValueError, match="`keep` must be at least 1, but is 0"):
        RunCheckpoints(tmp_path, keep=0)


def state(step: int) -> dict:
    return {"step": step, "moment": torch.arange(3.0), "config": {"betas": [0.9, 0.98]}}


@pytest.fixture
def make(tmp_path, model, tokenizer):
    """Checkpoints of a run, with `write`, which saves a step of the model."""

    class Checkpoints(RunCheckpoints):
        def write(self, step: int, **options) -> Path:
            return self.save(step, model, tokenizer, state(step), **options)

    return lambda keep, folder=tmp_path: Checkpoints(folder, keep)


def folders(checkpoints: RunCheckpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir() if path.is_dir())


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path, make, model, tokenizer):
    checkpoints = make(2, tmp_path / "run" / "checkpoints")
    assert checkpoints.newest() is None
    for step in (10, 20, 30, 40):
        checkpoints.write(step)
        if step == 10:
            checkpoints.mark_best(step)
    assert folders(checkpoints) == ["step_00000010", "step_00000030", "step_00000040"]
    assert (checkpoints.folder / "latest").read_text() == "step_00000040\n"
    assert resolve(tmp_path / "run").name == "step_00000010"
    checkpoints.mark_best(40)
    assert folders(checkpoints) == ["step_00000030", "step_00000040"]
    path, result = checkpoints.newest()
    assert (path.name, result["step"]) == ("step_00000040", 40)
    assert torch.equal(result["moment"], torch.arange(3.0))
    assert result["config"] == {"betas": [0.9, 0.98]}
    assert_same_weights(load_model(path).model, model)
    # Written again, it replaces the old one.
    checkpoints.save(40, model, tokenizer, state(40) | {"again": True})
    assert checkpoints.newest()[1]["again"]
    assert folders(checkpoints) == ["step_00000030", "step_00000040"]


def cut_short(path: Path) -> None:
    file = path / "training.pt"
    file.write_bytes(file.read_bytes()[:-100])


DAMAGES = {
    "cut_short": cut_short,
    "without_tensors": lambda path: (path / "training" / ".metadata").unlink(),
    "without_manifest": lambda path: (path / "manifest.json").unlink(),
    "without_tokenizer": lambda path: shutil.rmtree(path / "tokenizer"),
    "without_files": lambda path: (path / "manifest.json").write_text('{"step": 10, "bytes": {}}'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(make, model, tokenizer, damage, caplog):
    checkpoints = make(3)
    for step in (10, 20):
        checkpoints.save(step, model, tokenizer, state(step), {"moment": torch.ones(100, 3)})
    damage(checkpoints.path(20))
    with caplog.at_level(logging.WARNING, "effasr"):
        assert checkpoints.newest()[1]["step"] == 10
    assert "step_00000020" in caplog.text
    damage(checkpoints.path(10))
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read"):
        checkpoints.newest()


def test_a_checkpoint_that_is_not_marked_yet_counts(tmp_path, make):
    checkpoints = make(2)
    checkpoints.write(10)
    checkpoints.write(20)
    (tmp_path / "latest").write_text("step_00000010\n")
    assert checkpoints.newest()[1]["step"] == 20
    assert resolve(tmp_path).name == "step_00000020"
    checkpoints.mark_best(20)
    assert folders(checkpoints) == ["step_00000010", "step_00000020"]


@pytest.mark.parametrize("at", [0, 1])
def test_a_folder_published_while_it_is_removed_is_whole_or_absent(tmp_path, monkeypatch, at):
    """On a file system without locks, the process that writes it may be alive."""
    path, rmtree, calls = tmp_path / "step_00000002", shutil.rmtree, []
    (begin_folder(path) / "weights").touch()

    def publish_meanwhile(folder: Path, **options) -> None:
        calls.append(folder)
        if len(calls) == at + 1:
            (folder / "weights").unlink(missing_ok=True)
            with suppress(OSError):
                publish_folder(path)
        rmtree(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", publish_meanwhile)
    remove_hidden(tmp_path)
    assert len(calls) > at
    assert [*tmp_path.iterdir()] == ([] if at else [path])
    assert not path.exists() or (path / "weights").exists()


@pytest.mark.parametrize("is_begun_again", [False, True])
def test_a_checkpoint_whose_replacement_was_cut_off_is_put_back(make, monkeypatch, is_begun_again):
    checkpoints = make(1)
    checkpoints.write(10)
    rename = Path.rename

    def killed(self, target) -> Path:
        if self.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        # As on file systems that cannot exchange two names at once.
        patch.setattr("effasr.checkpoint._exchange", lambda one, other: False)
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.write(10)
    if is_begun_again:
        begin_folder(checkpoints.path(10))
    assert checkpoints.newest()[1]["step"] == 10
    checkpoints.write(20)
    assert folders(checkpoints) == ["step_00000020"]


def test_a_full_disk_is_an_error_that_leaves_nothing_behind(make, model, tokenizer):
    checkpoints = make(3)
    checkpoints.write(10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="step_00000020 cannot be written"):
            checkpoints.save(20, model, tokenizer, {"large": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert folders(checkpoints) == ["step_00000010"]
    assert checkpoints.newest()[1]["step"] == 10


def test_a_run_is_resolved_without_its_pointers(tmp_path, make, model):
    """A power cut between the first checkpoint and the file that points at it."""
    checkpoints = make(3, tmp_path / "checkpoints")
    path = checkpoints.write(10)
    assert resolve(path) == path
    (checkpoints.folder / "latest").unlink()
    assert resolve(tmp_path) == path
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="must be a model directory or a run"):
        resolve(tmp_path)


def test_no_checkpoint_is_removed_while_the_best_is_not_known(tmp_path, make, caplog):
    checkpoints = make(1)
    checkpoints.write(10, is_best=True)
    (tmp_path / "best").write_text("step_00000090\n")
    with caplog.at_level(logging.WARNING, "effasr"):
        checkpoints.write(20)
    assert folders(checkpoints) == ["step_00000010", "step_00000020"]
    assert "best must name a checkpoint beside it, but does not: write the name" in caplog.text
    with pytest.raises(CheckpointError, match="best must name a checkpoint beside it"):
        resolve(tmp_path)
    (tmp_path / "best").write_text("step_00000010\n")
    checkpoints.write(30)
    assert folders(checkpoints) == ["step_00000010", "step_00000030"]


@pytest.mark.parametrize("best", [10, 20])
def test_a_run_that_went_back_keeps_what_it_writes_then(tmp_path, make, best):
    """A best that was damaged is no longer pointed at."""
    checkpoints = make(2 if best == 20 else 1)
    for step in (10, 20):
        checkpoints.write(step, is_best=step == best)
    cut_short(checkpoints.path(20))
    assert checkpoints.newest()[1]["step"] == 10
    checkpoints.write(15)
    assert folders(checkpoints) == ["step_00000010", "step_00000015"]
    assert checkpoints.newest()[1]["step"] == 15
    assert resolve(tmp_path).name == ("step_00000015" if best == 20 else "step_00000010")
