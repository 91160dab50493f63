"""Scenario: a model directory is written over an older one."""

from __future__ import annotations

from pathlib import Path

from effasr.checkpoint import load_model, save_model
from tests.faults.checkpoint import filled_model


def _save(folder: Path, value: float):
    save_model(folder / "model", *filled_model(folder.with_name("cached"), value))


def prepare(folder: Path):
    _save(folder, 1.0)


def act(folder: Path):
    _save(folder, 2.0)


def check(folder: Path, fault: str, error: str):
    gone = folder.with_name("state.gone")
    if gone.exists():
        if (folder / "model").exists():
            assert _value(folder) == 2.0
        folder = gone
    assert _value(folder) in (1.0, 2.0)
    assert error or gone.exists() or _value(folder) == 2.0
    _save(folder, 3.0)
    assert _value(folder) == 3.0
    assert [path.name for path in folder.iterdir()] == ["model"]


def _value(folder: Path) -> float:
    parameters = load_model(folder / "model").model.parameters()
    (value,) = {one.unique().item() for one in parameters}
    return value
