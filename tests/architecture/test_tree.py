"""The layout of the tree: small folders, and the layers and suites that CONTRIBUTING shows."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOTS = ("effasr", "kernels", "profiling")
"""Whose folders are counted."""

LAYERS = [
    ["effasr.train", "effasr.launch"],
    ["effasr.cli"],
    ["effasr.planning"],
    ["effasr.training"],
    ["effasr.evaluation"],
    ["effasr.transcription"],
    ["effasr.decoding", "effasr.checkpoint"],
    ["effasr.interop"],
    ["effasr.model"],
    ["effasr.nn"],
    ["effasr.data", "effasr.optim", "effasr.distributed"],
    ["effasr.config", "effasr.ranges"],
    ["effasr.untrusted"],
    ["effasr_kernels"],
]
MOST_FILES, MOST_AT_THE_TOP = 15, 8


def files(folder: Path) -> list[str]:
    """The files of a folder, without the one that makes it a package."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    return sorted(name for name in names if name != "__init__.py" and name[0] != ".")


@pytest.mark.parametrize("root", ROOTS)
def test_no_folder_has_more_than_fifteen_files(root: str) -> None:
    folders = [ROOT / root, *(path for path in (ROOT / root).rglob("*") if path.is_dir())]
    counted = [path for path in folders if path.name not in ("__pycache__", "recipes", "results")]
    counted = [path for path in counted if not path.name.endswith(".egg-info")]
    assert len(counted) > 10
    crowded = {
        str(path.relative_to(ROOT)): len(files(path))
        for path in counted
        if len(files(path)) > MOST_FILES
    }
    assert crowded == {}


def test_the_top_of_effasr_is_small() -> None:
    assert len(files(ROOT / "effasr")) <= MOST_AT_THE_TOP


def test_the_layers_are_those_of_import_linter() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (one for one in settings["contracts"] if one["type"] == "layers")
    assert [line.split(" | ") for line in contract["layers"]] == LAYERS


def test_every_package_of_effasr_has_a_layer() -> None:
    found = {
        f"effasr.{path.stem}"
        for path in (ROOT / "effasr").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    layers = {name for layer in LAYERS for name in layer}
    assert found - {"effasr.__init__"} == layers - {"effasr_kernels"}


def test_contributing_shows_the_layers_in_their_order() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    shown = [line.strip().split("  ")[0] for line in text.splitlines() if line.startswith("    e")]
    assert [line.split(" | ") for line in shown] == LAYERS


def test_contributing_names_the_promise_of_every_suite() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("| Promise | ")[2].partition("\n\n")[0]
    paths = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    suites = {
        f"tests/{path.parts[1]}" if len(path.parts) > 2 else "tests/test_*.py" for path in paths
    }
    assert len(suites) > 15
    assert [name for name in sorted(suites) if f"`{name}`" not in table] == []
