"""Scenario: ``effasr export`` writes a model for transformers over an earlier export."""

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from safetensors.torch import load_file

from effasr.checkpoint import save_model
from effasr.cli.main import main
from tests.faults.checkpoint import check_replaced, filled_model


def _export(folder: Path, value: float) -> str:
    model, visible = folder.with_name("models") / f"{value:g}", io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(visible):
        code = main(["export", str(model), str(folder / "model"), "--author", f"value {value:g}"])
    lines = [line for line in visible.getvalue().splitlines() if line.startswith("effasr export: ")]
    return lines[-1].removeprefix("effasr export: ") if code else ""


def prepare(folder: Path):
    """Make three models, and export the first; its folder gets a file of somebody else."""
    for value in (1.0, 2.0, 3.0):
        model = filled_model(folder.with_name("cached"), value)
        save_model(folder.with_name("models") / f"{value:g}", *model)
    assert _export(folder, 1.0) == ""
    (folder / "model" / "notes.txt").write_text("kept")


def act(folder: Path) -> str:
    return _export(folder, 2.0)


def check(folder: Path, fault: str, error: str):
    model = check_replaced(folder, error, _export, _value)
    assert (model / "notes.txt").read_text() == "kept"
    names = {"README.md", "config.json", "model.safetensors", "notes.txt"}
    names |= {"preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in model.iterdir()} == names


def _value(folder: Path) -> float:
    """Return the value of which all files are."""
    weights = load_file(folder / "model" / "model.safetensors")
    is_filled = lambda name: "running_" not in name and "num_batches" not in name
    values = {item.unique().item() for name, item in weights.items() if is_filled(name)}
    (value,) = values
    assert f"Author: value {value:g}." in (folder / "model" / "README.md").read_text()
    assert (folder / "model" / "config.json").stat().st_size
    return value
