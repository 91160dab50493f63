"""Scenario: a checkpoint is written, which replaces older ones and is the best.

Step 1 was the best before, step 2 is the newest. Step 9 is damaged: the run went on from step 2.
"""

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from effasr.checkpoint import load_model, resolve
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerConfig
from effasr.training.checkpointing.run_checkpoints import TENSORS, RunCheckpoints, tensor_files

logging.disable(logging.CRITICAL)
torch.set_num_threads(1)


@cache
def _parts(cached: str) -> tuple[ASRModel, Any]:
    from effasr.data.tokenizer import train_tokenizer

    texts = {"en": ["one two three four", "five six seven eight nine"]}
    tokenizer = train_tokenizer(texts, Path(cached) / "tokenizer", vocab_size=24)
    encoder = FastConformerConfig(
        width=16, layers=1, heads=2, feed_forward=16, subsampling_channels=4
    )
    config = ModelConfig(encoder=encoder, decoder=None, ctc=True)
    return ASRModel(config, tokenizer.vocab_size), tokenizer


def filled_model(cached: Path, value: float) -> tuple[ASRModel, Any]:
    model, tokenizer = _parts(str(cached))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model, tokenizer


def _save(folder: Path, step: int, *, is_best: bool = False):
    model, tokenizer = filled_model(folder.with_name("cached"), float(step))
    checkpoints = RunCheckpoints(folder, keep=1)
    staged = checkpoints.stage({"moment": torch.full((5000,), float(step))})
    checkpoints.save(step, model, tokenizer, {"step": step}, staged, is_best=is_best)


def prepare(folder: Path):
    """Make three checkpoints; the last is damaged."""
    _save(folder, 1, is_best=True)
    _save(folder, 2)
    newest = folder.with_name("newest")
    _save(newest, 9)
    damaged = (newest / "step_00000009").rename(folder / "step_00000009")
    (damaged / "model.safetensors").write_bytes(b"damaged")


def act(folder: Path):
    _save(folder, 3, is_best=True)


def check(folder: Path, fault: str, error: str):
    """Check that the newest is step 2 or 3, whole, and that the next start goes on."""
    gone = folder.with_name("state.gone")
    if gone.exists():
        # Whatever is in the new folder is whole, or there is nothing.
        result = RunCheckpoints(folder, keep=1).newest() if folder.exists() else None
        assert result is None or result[1] == {"step": 3}
        folder = gone
    path, state = RunCheckpoints(folder, keep=1).newest() or (Path(), {})
    assert path.name == f"step_{state['step']:08d}"
    assert state["step"] in (2, 3)
    if not error:
        assert state["step"] == 3 or gone.exists()
    _check_whole(path, state["step"])
    # What evaluation takes: the best of before or of after.
    best = int(resolve(folder).name.removeprefix("step_"))
    assert best in (1, 2, 3)
    assert best != 2 or state["step"] == 3, "the best was lost"
    _check_whole(resolve(folder), best)
    # The next start.
    _save(folder, 4, is_best=True)
    names = sorted(item.name for item in folder.iterdir())
    assert names == ["best", "latest", "step_00000004"], names
    assert (folder / "latest").read_text() == (folder / "best").read_text() == "step_00000004\n"


def check_replaced(folder: Path, error: str, write: Callable, read: Callable) -> Path:
    """Check that ``model`` is the one before or the one after, and that it can be written again."""
    gone = folder.with_name("state.gone")
    if gone.exists():
        if (folder / "model").exists():
            assert read(folder) == 2.0
        folder = gone
    value = read(folder)
    assert value in (1.0, 2.0)
    assert error or gone.exists() or value == 2.0
    assert not write(folder, 3.0)
    assert read(folder) == 3.0
    assert [path.name for path in folder.iterdir()] == ["model"]
    return folder / "model"


def _check_whole(path: Path, step: int):
    model = load_model(path).model
    assert {item.unique().item() for item in model.parameters()} == {float(step)}
    moment = tensor_files.read_whole(path / TENSORS)["moment"]
    assert torch.equal(moment, torch.full((5000,), float(step)))
