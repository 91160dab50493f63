"""Scenario: a model directory is written over an older one."""

from pathlib import Path

from effasr.checkpoint import load_model, save_model
from tests.faults.checkpoint import check_replaced, filled_model


def _save(folder: Path, value: float):
    save_model(folder / "model", *filled_model(folder.with_name("cached"), value))


def prepare(folder: Path):
    _save(folder, 1.0)


def act(folder: Path):
    _save(folder, 2.0)


def check(folder: Path, fault: str, error: str):
    check_replaced(folder, error, _save, _value)


def _value(folder: Path) -> float:
    parameters = load_model(folder / "model").model.parameters()
    (value,) = {item.unique().item() for item in parameters}
    return value
